"""What a person sees in a terminal: coloured tokens, the legend, status tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cluster.completion import Chunk, Completion, DraftStatistics, Origin
from outrider.cluster.status import READY, EngineTotals, ServiceStatus

# Draft positions in darkening greens; one colour serves all further positions.
_DRAFT = ("bright_green", "green", "dark_green", "dark_olive_green3")
_OTHERS = {"plain": "default", "recovered": "yellow", "bonus": "cyan"}


def style_of(origin: Origin) -> str:
    """The colour of a token of that origin."""
    if origin.kind == "draft":
        return _DRAFT[min(origin.position, len(_DRAFT)) - 1]
    return _OTHERS[origin.kind]


def legend(num_speculative_tokens: int) -> Text:
    """What the colours mean."""
    parts = Text("tokens: ")
    for position in range(1, min(num_speculative_tokens, len(_DRAFT)) + 1):
        parts.append(f"draft {position}", _DRAFT[position - 1]).append("  ")
    for kind, meaning in (
        ("recovered", "recovered"),
        ("bonus", "bonus"),
        ("plain", "no draft in the round"),
    ):
        parts.append(meaning, _OTHERS[kind]).append("  ")
    return parts


def write_coloured(console: Console, chunk: Chunk) -> None:
    """Writes a chunk's tokens in their colours, without a line end."""
    text = Text()
    for piece, origin in zip(chunk.token_texts, chunk.origins, strict=False):
        text.append(piece, style_of(origin))
    console.print(text, end="", soft_wrap=True)


def statistics_line(completion: Completion) -> str:
    """One request's counts in words."""
    drafts, usage = completion.draft_statistics, completion.usage
    rates = ", ".join(f"{rate:.0%}" for rate in acceptance_rates(drafts))
    accepted = f"; accepted by position {rates}" if rates else ""
    return (
        f"{usage.completion_tokens} tokens in {drafts.rounds} rounds, "
        f"{drafts.acceptance_length:.2f} tokens a round{accepted}"
    )


def acceptance_rates(totals: DraftStatistics | EngineTotals) -> tuple[float, ...]:
    """Per position, the share of drafted tokens that was accepted."""
    pairs = zip(totals.drafted_per_position, totals.accepted_per_position, strict=True)
    return tuple(accepted / drafted for drafted, accepted in pairs if drafted)


def status_table(status: ServiceStatus) -> Table:
    """Every actor of a service."""
    title = f"{status.service}: {'ready' if status.ready else 'not ready'}, target {status.target}"
    table = Table(title=title)
    for name in ("actor", "state", "device", "sampler", "threads", "running", "waiting", "KV"):
        table.add_column(name)
    for role in status.roles:
        for replica in role.replicas:
            blocks = f"{replica.kv_blocks_used}/{replica.kv_blocks_total}"
            table.add_row(
                "/".join(replica.name.split("/")[-2:]),
                replica.state,
                replica.device,
                replica.sampler,
                str(replica.threads or ""),
                str(replica.running_requests),
                str(replica.waiting_requests),
                blocks if replica.kv_blocks_total else "",
            )
    return table


def progress_line(status: ServiceStatus) -> str:
    """What is ready of what is wanted."""
    counts = [
        f"{sum(one.state == READY for one in role.replicas)}/{role.desired} {role.role}s"
        for role in status.roles
        if role.desired
    ]
    return f"ready: {', '.join(counts)}"
