"""Acceptance length of a head on the first turns of MT-Bench.

    python -m benchmarks.acceptance --temperature 0 --temperature 1 --json acceptance.json

Runs the real engine with the head beside it (co-located: where the drafter stands does not change
what is accepted), prints a table, and writes JSON and, beside it, a plot by category. Acceptance
length is tokens per target forward per request, over the rounds that had drafts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.cluster.config import ServiceConfig
from outrider.cluster.demo import packaged_target
from outrider.cluster.loading import engine_config, load_link, target_config
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.target import Target
from outrider.verifier.types import GenerationRequest

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "mt_bench_questions.jsonl"


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    console = Console()
    config = ServiceConfig()
    config = replace(
        config,
        target=replace(config.target, path=options.target or packaged_target()),
        draft=replace(config.draft, placement="colocated", num_speculative_tokens=options.k),
    )
    if options.head:
        config = replace(config, draft=replace(config.draft, head=options.head))
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()][: options.limit]
    target = Target.load(target_config(config))
    rows = []
    for temperature in options.temperature or [0.0, 1.0]:
        engine = Engine(target, engine_config(config, "bench"), load_link(config, {}))
        rows.append(measure(engine, questions, temperature, options, console))
    report = {
        "rows": rows,
        "machine": f"{platform.processor() or platform.machine()}, {options.threads} threads",
        "target": config.target.path.rsplit("/", 1)[-1],
        "max_tokens": options.max_tokens,
    }
    console.print(table(rows, options.k))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        plot(rows, Path(options.json).with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Acceptance length on MT-Bench first turns.")
    parser.add_argument("--target", help="model path; the demo's target by default")
    parser.add_argument("--head", help="head folder; the packaged one by default")
    parser.add_argument("--k", type=int, default=2, help="draft tokens a round")
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=80, help="questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write the report here, and a plot beside it")
    return parser.parse_args()


def measure(
    engine: Engine,
    questions: list[dict[str, Any]],
    temperature: float,
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Answers every question at one temperature, many at once."""
    tokenizer = engine.target.tokenizer
    for number, question in enumerate(questions):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question["turns"][0]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
                parameters=SamplingParameters(temperature=temperature),
                max_tokens=options.max_tokens,
                seed=options.seed + number,
            )
        )
    rounds: dict[str, int] = defaultdict(int)
    accepted: dict[str, int] = defaultdict(int)
    tokens = 0
    began = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"temperature {temperature:g}", total=len(questions))
        while engine.has_work():
            for output in engine.step():
                category = questions[int(output.request_id)]["category"]
                tokens += len(output.token_ids)
                if output.drafted:
                    rounds[category] += 1
                    accepted[category] += output.accepted
                if output.finish_reason is not None:
                    progress.advance(bar)
    stats = engine.stats
    return {
        "temperature": temperature,
        "k": options.k,
        "acceptance_length": 1 + sum(accepted.values()) / max(1, sum(rounds.values())),
        "acceptance_rate_per_position": [
            a / max(1, d)
            for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
        ],
        "by_category": {c: 1 + accepted[c] / rounds[c] for c in sorted(rounds)},
        "tokens": tokens,
        "drafted_rounds": sum(rounds.values()),
        "seconds": time.perf_counter() - began,
    }


def table(rows: list[dict[str, Any]], k: int) -> Table:
    """One line a temperature."""
    out = Table(title=f"MT-Bench first turns, K={k}")
    for name in ("temperature", "acceptance length", "rate per position", "tokens"):
        out.add_column(name, justify="right")
    for row in rows:
        rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_per_position"])
        out.add_row(
            f"{row['temperature']:g}", f"{row['acceptance_length']:.3f}", rates, str(row["tokens"])
        )
    return out


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars by category, one colour a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        names = list(row["by_category"])
        places = [i + number * width for i in range(len(names))]
        label = f"temperature {row['temperature']:g}"
        axes.bar(places, list(row["by_category"].values()), width, label=label)
        axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set_ylabel("tokens per target forward")
    axes.set_ylim(bottom=1)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
