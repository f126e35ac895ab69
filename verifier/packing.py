"""Between the records of requests and the arrays of a round, in both directions.

Axes: B requests that draw a token, N their drafts, T packed rows, S rows that drafters are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.rejection import DraftTokens, DrawKeys, RowParameters, Verification
from outrider.protos.messages import RequestOpen, VerdictBatch
from outrider.verifier.attention import Segment
from outrider.verifier.drafts import Chain
from outrider.verifier.request import Request
from outrider.verifier.scheduler import Work
from outrider.verifier.target import PackedBatch

Drawing: TypeAlias = Sequence[tuple[Request, Chain | None]]


@dataclass(frozen=True)
class Told:
    """Rows of one request that became certain: `rows` from position `base`, at packed `first`.

    drawn: the round drew this request's next token, so that drafts can follow.
    """

    request: Request
    base: int
    rows: int
    first: int
    accepted: int
    drawn: bool


def opening(request: Request, method: str) -> RequestOpen:
    """What a drafter must know of a request as it (again) begins."""
    source = request.source
    prompt = len(source.prompt_ids)
    return RequestOpen(
        request_id=request.number,
        epoch=request.epoch,
        prompt_ids=np.array(request.tokens[:prompt], dtype=np.int32),
        output_ids=np.array(request.tokens[prompt:], dtype=np.int32),
        seed=source.seed,
        sample_index=source.sample_index,
        parameters=source.parameters,
        method=method,
    )


def pack(work: Sequence[Work], chains: Sequence[Chain | None]) -> PackedBatch:
    """Known tokens and drafts of a round, request behind request; logits where a token is drawn."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for item, chain in zip(work, chains, strict=True):
        known = item.request.tokens[item.start : item.start + item.rows]
        drafts = [] if chain is None else chain.token_ids.tolist()
        if item.samples:
            last = len(tokens) + len(known) - 1
            logit_rows.extend(range(last, last + len(drafts) + 1))
        tokens += known
        tokens += drafts
        context = item.start + len(known) + len(drafts)
        positions.extend(range(item.start, context))
        segments.append(
            Segment(rows=len(known) + len(drafts), context=context, blocks=item.request.blocks)
        )
    return PackedBatch(tokens, positions, segments, logit_rows)


def processed(logits: Tensor, drawing: Drawing) -> Tensor:
    """The logits [N + B, V] with every request's penalties, bias and masks; itself if none has."""
    if all(request.processor is None for request, _ in drawing):
        return logits
    logits = logits.float().clone()
    first = 0
    for request, chain in drawing:
        drafts = [] if chain is None else chain.token_ids.tolist()
        rows = logits[first : first + len(drafts) + 1]
        if request.processor is not None:
            request.processor.apply(rows[:, : request.processor.columns], drafts)
        first += len(drafts) + 1
    return logits


def draft_tokens(drawing: Drawing, device: torch.device) -> DraftTokens:
    """The chains of a round side by side."""
    chains = [chain for _, chain in drawing if chain is not None]
    lengths = [0 if chain is None else len(chain.token_ids) for _, chain in drawing]
    return DraftTokens(
        cu_num_draft_tokens=_starts(np.array(lengths, dtype=np.int32), device),
        token_ids=_joined([chain.token_ids for chain in chains], np.int32, device),
        cu_support=_starts(
            np.concatenate([np.zeros(0, np.int32), *(c.support_sizes for c in chains)]), device
        ),
        support_ids=_joined([chain.support_ids for chain in chains], np.int32, device),
        support_weights=_joined([chain.support_weights for chain in chains], np.float32, device),
        deterministic=torch.tensor(
            [
                chain is not None and (chain.deterministic or request.source.parameters.greedy)
                for request, chain in drawing
            ],
            device=device,
        ),
    )


def row_parameters(drawing: Drawing, device: torch.device) -> RowParameters:
    """How each request is sampled, [B]."""
    wanted = [request.source.parameters for request, _ in drawing]
    return RowParameters(
        temperature=torch.tensor([float(p.temperature) for p in wanted], device=device),
        top_k=torch.tensor([p.top_k for p in wanted], dtype=torch.int32, device=device),
        top_p=torch.tensor([float(p.top_p) for p in wanted], device=device),
        min_p=torch.tensor([float(p.min_p) for p in wanted], device=device),
    )


def draw_keys(drawing: Drawing, device: torch.device) -> DrawKeys:
    """Which random numbers each request sees, [B]; the first decided position is the length."""
    lengths = torch.tensor([r.committed for r, _ in drawing], dtype=torch.int32, device=device)
    seeds = np.array([r.source.seed for r, _ in drawing], dtype=np.uint64).view(np.int64)
    return DrawKeys(
        seeds=torch.from_numpy(seeds).to(device),
        sample_indices=torch.tensor(
            [r.source.sample_index for r, _ in drawing], dtype=torch.int32, device=device
        ),
        base_lengths=lengths,
        positions=lengths,
    )


def verdicts(verification: Verification | None) -> Iterator[tuple[int, int, bool]]:
    """Accepted count, next token and whether it failed, request by request."""
    if verification is None:
        return
    yield from zip(
        verification.num_accepted.tolist(),
        verification.next_token_ids.tolist(),
        verification.failed.tolist(),
        strict=True,
    )


def to_tell(work: Sequence[Work], chains: Sequence[Chain | None]) -> list[Told]:
    """What drafters learn after a round was committed: the rows of requests that go on."""
    told: list[Told] = []
    first = 0
    for item, chain in zip(work, chains, strict=True):
        request = item.request
        if request.opened and request.finish_reason is None:
            rows = request.computed - item.start
            told.append(
                Told(request, item.start, rows, first, rows - item.rows, request.pending == 1)
            )
        first += item.rows + (0 if chain is None else len(chain.token_ids))
    return told


def feature_rows(told: Sequence[Told], device: torch.device) -> Tensor:
    """[S] int64: the packed rows whose features are sent."""
    rows = [np.arange(item.first, item.first + item.rows) for item in told]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def verdict_batch(
    told: Sequence[Told],
    features: Any,
    *,
    service: str,
    sender: str,
    round_number: int,
    head_version: int,
) -> VerdictBatch:
    """Row i of a request is the feature of position base + i, with the id of the token after it."""
    tokens = [item.request.tokens[item.base + 1 : item.base + item.rows + 1] for item in told]
    return VerdictBatch(
        service=service,
        sender=sender,
        round=round_number,
        target_version=0,
        head_version=head_version,
        request_ids=np.array([item.request.number for item in told], dtype=np.int64),
        epochs=np.array([item.request.epoch for item in told], dtype=np.int32),
        base_lengths=np.array([item.base for item in told], dtype=np.int32),
        num_accepted=np.array([item.accepted for item in told], dtype=np.int32),
        num_to_draft=np.array(
            [item.request.draft_room if item.drawn else 0 for item in told], dtype=np.int32
        ),
        cu_tokens=np.concatenate([[0], np.cumsum([item.rows for item in told])]).astype(np.int32),
        token_ids=np.concatenate([np.array(t, dtype=np.int32) for t in tokens]),
        features=features,
    )


def _starts(lengths: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _joined(parts: Sequence[Any], dtype: Any, device: torch.device) -> Tensor:
    held = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
    return torch.from_numpy(held).to(device)
