"""The loss curve and the expected acceptance length of a training run, as one picture."""

from __future__ import annotations

import json
from pathlib import Path


def plot_training(log: Path, out: Path) -> None:
    """Reads the trainer's `log.jsonl` and writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [e for e in entries if "loss" in e]
    checks = [e for e in entries if "overlap" in e]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot([e["step"] for e in steps], [e["loss"] for e in steps], linewidth=0.5, alpha=0.4)
    width = max(1, len(steps) // 50)
    smooth = [
        sum(e["loss"] for e in steps[max(0, i - width) : i + 1]) / (min(i, width) + 1)
        for i in range(len(steps))
    ]
    left.plot([e["step"] for e in steps], smooth)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    for name, label in (("acceptance_length_t0", "temperature 0"), ("acceptance_length_t1", "1")):
        right.plot([e["step"] for e in checks], [e[name][1] for e in checks], "o-", label=label)
    right.set(xlabel="step", ylabel="tokens per forward", title="expected acceptance length, K=2")
    right.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)
