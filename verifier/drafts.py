"""Which of the drafts that arrived may be verified; everything else is dropped and counted.

A chain is used only for the request, the life, the committed length and the last token that it
was drafted for. It is used as a whole or not at all, and that never depends on the tokens drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.protos.messages import Array, DraftBatch, Int32, MalformedMessage
from outrider.verifier.link import Batch
from outrider.verifier.request import Request


@dataclass(frozen=True, eq=False)
class Chain:
    """One request's drafts of a round."""

    token_ids: Int32  # [n]
    support_sizes: Int32  # [n]
    support_ids: Array  # [m] int32
    support_weights: Array  # [m] float32
    deterministic: bool


@dataclass(frozen=True)
class Matched:
    """Chains by request number, and how many were dropped and why."""

    chains: Mapping[int, Chain]
    stale: int
    malformed: int
    lawless: int
    missing: int  # wanted, and not there in any form
    num_bytes: int


def wanted(requests: Sequence[Request]) -> Batch:
    """What to ask the link for: the state each request's drafts have to fit."""
    return Batch(
        request_ids=np.array([r.number for r in requests], dtype=np.int64),
        epochs=np.array([r.epoch for r in requests], dtype=np.int32),
        base_lengths=np.array([r.committed for r in requests], dtype=np.int32),
        last_token_ids=np.array([r.tokens[-1] for r in requests], dtype=np.int32),
        num_draft_tokens=np.array([r.asked for r in requests], dtype=np.int32),
    )


def match(drafts: DraftBatch, requests: Sequence[Request], vocab_size: int) -> Matched:
    """Sorts what arrived by request; the first fitting chain of a request counts."""
    by_number = {request.number: request for request in requests}
    chains: dict[int, Chain] = {}
    answered: set[int] = set()
    malformed = stale = lawless = 0
    parts, broken = _sound(drafts, vocab_size)
    malformed += len(broken)
    answered.update(broken)
    for part in parts:
        for entry in range(len(part.request_ids)):
            number = int(part.request_ids[entry])
            request = by_number.get(number)
            if request is None or not _fits(part, entry, request):
                stale += 1
                continue
            answered.add(number)
            chain = _chain(part, entry)
            if len(chain.token_ids) > request.asked:
                malformed += 1
            elif _lawless(chain, request):
                lawless += 1
            elif len(chain.token_ids) and number not in chains:
                chains[number] = chain
    missing = sum(number not in answered for number in by_number)
    return Matched(chains, stale, malformed, lawless, missing, _num_bytes(drafts))


def _fits(drafts: DraftBatch, entry: int, request: Request) -> bool:
    return (
        int(drafts.epochs[entry]) == request.epoch
        and int(drafts.base_lengths[entry]) == request.committed
        and int(drafts.last_token_ids[entry]) == request.tokens[-1]
    )


def _lawless(chain: Chain, request: Request) -> bool:
    """A sampled token without the law it was drawn from can be neither accepted nor refused."""
    if chain.deterministic or request.source.parameters.greedy:
        return False
    return bool((chain.support_sizes == 0).any())


def _chain(drafts: DraftBatch, entry: int) -> Chain:
    first, last = drafts.cu_num_draft_tokens[entry : entry + 2]
    offsets = drafts.cu_support[first : last + 1]
    return Chain(
        token_ids=drafts.token_ids[first:last],
        support_sizes=np.diff(offsets),
        support_ids=drafts.support_ids[offsets[0] : offsets[-1]].astype(np.int32),
        support_weights=drafts.support_weights[offsets[0] : offsets[-1]].astype(np.float32),
        deterministic=drafts.deterministic,
    )


def _sound(drafts: DraftBatch, vocab_size: int) -> tuple[list[DraftBatch], list[int]]:
    """Validated batches, and the request ids of entries that are not sound."""
    try:
        drafts.validate(vocab_size)
        return [drafts], []
    except MalformedMessage:
        pass
    sound, broken = [], []
    for number, part in _split(drafts):
        try:
            part.validate(vocab_size)
            sound.append(part)
        except MalformedMessage:
            broken.append(number)
    return sound, broken


def _split(drafts: DraftBatch) -> Iterator[tuple[int, DraftBatch]]:
    """One batch an entry, so that a broken one takes no other along; none if offsets are broken."""
    if not _offsets_hold(drafts):
        return
    for entry in range(len(drafts.request_ids)):
        first, last = (int(x) for x in drafts.cu_num_draft_tokens[entry : entry + 2])
        begin, end = int(drafts.cu_support[first]), int(drafts.cu_support[last])
        one = slice(entry, entry + 1)
        yield (
            int(drafts.request_ids[entry]),
            replace(
                drafts,
                request_ids=drafts.request_ids[one],
                epochs=drafts.epochs[one],
                base_lengths=drafts.base_lengths[one],
                last_token_ids=drafts.last_token_ids[one],
                cu_num_draft_tokens=np.array([0, last - first], dtype=np.int32),
                token_ids=drafts.token_ids[first:last],
                parents=drafts.parents[first:last],
                cu_support=drafts.cu_support[first : last + 1] - np.int32(begin),
                support_ids=drafts.support_ids[begin:end],
                support_weights=drafts.support_weights[begin:end],
            ),
        )


def _offsets_hold(drafts: DraftBatch) -> bool:
    """Whether the arrays can be cut at the offsets that the batch names."""
    entries, tokens = drafts.request_ids, drafts.token_ids
    arrays = [value for value in vars(drafts).values() if isinstance(value, np.ndarray)]
    if len(arrays) != 10 or any(array.ndim != 1 for array in arrays):
        return False
    sizes = {len(a) for a in (drafts.epochs, drafts.base_lengths, drafts.last_token_ids)}
    return (
        entries.dtype == np.int64
        and sizes == {len(entries)}
        and len(drafts.parents) == len(tokens)
        and len(drafts.support_weights) == len(drafts.support_ids)
        and _rises(drafts.cu_num_draft_tokens, len(entries), len(tokens))
        and _rises(drafts.cu_support, len(tokens), len(drafts.support_ids))
    )


def _rises(offsets: Array, parts: int, total: int) -> bool:
    return (
        offsets.dtype == np.int32
        and len(offsets) == parts + 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == total
        and bool((np.diff(offsets) >= 0).all())
    )


def _num_bytes(drafts: DraftBatch) -> int:
    return sum(value.nbytes for value in vars(drafts).values() if isinstance(value, np.ndarray))
