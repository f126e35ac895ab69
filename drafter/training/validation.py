"""How long the accepted chains of a head would be, from held-out chats alone.

Speculation does not start a round at every position: it walks, and a round that accepts much skips
what was easy. The mean over all positions is therefore too good; the walk is followed instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafter.head import Eagle3Head
from outrider.drafter.training.objective import Batch, unroll


@dataclass(frozen=True)
class Validation:
    """Quality on held-out chats; an entry a draft position, from 1.

    agreement: share of positions whose draft argmax is the target's; overlap: mean sum(min(p, q))
    at temperature 1, over the full vocabulary; acceptance_length_t0 / _t1: expected tokens per
    target forward when so many are drafted, on a walk along the chats' own text.
    """

    step: int
    agreement: tuple[float, ...]
    overlap: tuple[float, ...]
    acceptance_length_t0: tuple[float, ...]
    acceptance_length_t1: tuple[float, ...]


@torch.no_grad()
def validate(
    head: Eagle3Head,
    embedding: Tensor,
    lm_head: Tensor,
    rope: tuple[Tensor, Tensor],
    batches: Iterable[Batch],
    steps: int,
    at_step: int,
) -> Validation:
    """Teacher-forced quality, judged in the target's full vocabulary.

    Args:
        embedding, lm_head: the target's [V, H] tables.
        rope: as `unroll` takes it.
        steps: how many draft positions.
        at_step: the training step to report.
    """
    ids = head.target_ids()
    sums, counts = torch.zeros(2, steps, dtype=torch.float64), torch.zeros(steps)
    walks = torch.zeros(2, steps, 2, dtype=torch.float64)
    for batch in batches:
        shape = (steps, batch.tokens.shape[0], batch.tokens.shape[1] - 1)
        accept = torch.zeros(2, *shape)
        with torch.autocast("cpu", torch.bfloat16):
            for number, step in enumerate(unroll(head, embedding, rope, batch, steps)):
                p = (step.target_hidden @ lm_head.T).float().softmax(-1)
                q = head.logits(step.hidden).float().softmax(-1)
                same = (ids[q.argmax(-1)] == p.argmax(-1)).float()
                overlap = torch.minimum(p[:, ids], q).sum(-1)
                for row, value in enumerate((same, overlap)):
                    accept[row, number][step.rows] = value
                    sums[row, number] += value.sum().item()
                counts[number] += len(same)
        for row in range(2):
            for k in range(steps):
                walks[row, k] += torch.tensor(
                    walk(accept[row, : k + 1], batch.prompts, batch.lengths), dtype=torch.float64
                )
    mean = sums / counts.clamp(min=1)
    lengths = walks[..., 0] / walks[..., 1].clamp(min=1)
    return Validation(
        at_step,
        tuple(mean[0].tolist()),
        tuple(mean[1].tolist()),
        tuple(lengths[0].tolist()),
        tuple(lengths[1].tolist()),
    )


def walk(accept: Tensor, prompts: Tensor, lengths: Tensor) -> tuple[float, float]:
    """Expected tokens emitted and rounds taken on the way along given texts.

    The target emits an answer's first token alone. Row i of a chat is the chain that drafts
    tokens i+2, i+3, ...; a round there that accepts a of them goes on in row i+1+a.

    Args:
        accept: [K, B, T], the probability that draft k of a row is accepted, given those before.
        prompts, lengths: int64 [B], tokens of the prompt and in all.
    """
    steps, chats, rows = accept.shape
    accept = accept.double()
    visits = torch.zeros(chats, rows + steps + 1, dtype=torch.float64)
    visits[torch.arange(chats), prompts - 1] = 1
    tokens = rounds = 0.0
    for row in range(rows):
        here = visits[:, row] * (row + 2 < lengths)
        rounds += float(here.sum())
        for accepted in range(steps + 1):
            rejected = 1 - accept[accepted, :, row] if accepted < steps else 1
            visits[:, row + 1 + accepted] += here * rejected
            tokens += float((here * rejected).sum()) * (accepted + 1)
            if accepted < steps:
                here = here * accept[accepted, :, row]
    return tokens, rounds
