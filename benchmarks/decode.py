"""Decoding rates on the CPU: plain, speculative, and transformers' `generate`, in one run.

    python -m benchmarks.decode --json decode.json

All three answer the same chat prompt with 128 greedy tokens, on one stream and on eight, in the
same process and with the same threads; plain and speculative rounds come from the same engine.
Each rate is the median over the repeats, and the repeats alternate.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.cluster.config import ServiceConfig
from outrider.cluster.demo import packaged_target
from outrider.cluster.loading import (
    engine_config,
    load_link,
    load_training_target,
    target_config,
)
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.target import Target
from outrider.verifier.types import GenerationRequest

PROMPT = "Explain how a bicycle stays upright, in a few paragraphs."


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    config = ServiceConfig()
    config = replace(
        config,
        target=replace(config.target, path=packaged_target(), compile=options.compile),
        draft=replace(config.draft, placement="colocated", num_speculative_tokens=options.k),
    )
    target = Target.load(target_config(config))
    engine = Engine(target, engine_config(config, "bench"), load_link(config, {}))
    target.warm_up()
    model, tokenizer = load_training_target(config.target.path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows: list[dict[str, Any]] = []
    for streams in (1, 8):
        rates: dict[str, list[float]] = {"plain": [], "speculative": [], "transformers": []}
        for _ in range(options.repeats):
            rates["plain"].append(ours(engine, prompt, streams, 0, options))
            rates["speculative"].append(ours(engine, prompt, streams, None, options))
            rates["transformers"].append(theirs(model, prompt, streams, options))
        middle = {name: statistics.median(values) for name, values in rates.items()}
        rows.append({"streams": streams, **middle})
    report = {
        "rows": rows,
        "k": options.k,
        "threads": options.threads,
        "compile": options.compile,
        "machine": platform.processor() or platform.machine(),
    }
    Console().print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding rates on the CPU.")
    parser.add_argument("--k", type=int, default=2, help="draft tokens a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", choices=("off", "warmup"), default="warmup")
    parser.add_argument("--json", help="write the report here")
    return parser.parse_args()


def ours(
    engine: Engine, prompt: list[int], streams: int, drafts: int | None, options: argparse.Namespace
) -> float:
    """Tokens per second after the first token of every stream."""
    for number in range(streams):
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=tuple(prompt),
                parameters=SamplingParameters(temperature=0.0),
                max_tokens=options.tokens,
                seed=number,
                ignore_eos=True,
                num_speculative_tokens=drafts,
            )
        )
    begun: set[str] = set()
    tokens, start = 0, 0.0
    while engine.has_work():
        outputs = engine.step()
        if len(begun) < streams:
            begun |= {output.request_id for output in outputs}
            start = time.perf_counter()
        else:
            tokens += sum(len(output.token_ids) for output in outputs)
    return tokens / (time.perf_counter() - start)


def theirs(model: Any, prompt: list[int], streams: int, options: argparse.Namespace) -> float:
    """The same of transformers; its prefill is measured apart and taken off."""
    ids = torch.tensor([prompt] * streams)

    def run(tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    first = run(1)
    return streams * (options.tokens - 1) / (run(options.tokens) - first)


def table(rows: list[dict[str, Any]]) -> Table:
    """Tokens per second."""
    out = Table(title="tokens per second, temperature 0")
    for name in ("streams", "plain", "speculative", "transformers"):
        out.add_column(name, justify="right")
    for row in rows:
        rates = (f"{row[name]:.1f}" for name in ("plain", "speculative", "transformers"))
        out.add_row(str(row["streams"]), *rates)
    return out


if __name__ == "__main__":
    main()
