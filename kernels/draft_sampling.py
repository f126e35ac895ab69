"""Draft sampling and packing: the law that is shipped is the law that is drawn from.

A row of draft logits becomes p (the request's own filters), is cut to the smallest support whose
tail is small enough, rounded down to float16, and only then sampled, with integers, from exactly
those weights. Truncation and rounding cost a little acceptance and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.philox import Purpose, random_words
from outrider.kernels.rejection import NO_TOKEN, DrawKeys, RowParameters

# Every finite float16 is a whole number of these units.
UNITS = 2**24
DEFAULT_TAIL = 0.01
DEFAULT_MAX_SUPPORT = 240


@dataclass(frozen=True)
class PackedDraft:
    """One draft token a request, in the target's vocabulary, with its law.

    A row whose logits were not finite failed: it has NO_TOKEN and no support, and its chain ends
    before it. Greedy rows have no support either; they are deterministic.
    """

    token_ids: Tensor  # int32 [B]
    cu_support: Tensor  # int32 [B+1]
    support_ids: Tensor  # int32 [M]
    support_weights: Tensor  # float16 [M], above 0; a slice sums to at most 1
    failed: Tensor  # bool [B]


def draft_and_pack(
    logits: Tensor,
    parameters: RowParameters,
    keys: DrawKeys,
    d2t: Tensor | None = None,
    tail: float = DEFAULT_TAIL,
    max_support: int = DEFAULT_MAX_SUPPORT,
    vocab_size: int | None = None,
) -> PackedDraft:
    """Draws one token for each request and packs what it was drawn from.

    Args:
        logits: [B, Vd] any float type, the draft head's.
        parameters: one row a request; temperature 0 drafts the argmax.
        keys: one row a request; the DRAFT number of seed, sample index, base length and position
            decides, where the position is that of the drawn token.
        d2t: int64 [Vd], the target id of each draft id, no two alike; None where they are equal.
        tail: how much mass the support may leave out.
        max_support: how many entries it may have.
        vocab_size: columns of the logits from here on are padding; None if there are none.
    """
    if max_support < 1:
        raise ValueError(f"max_support: {max_support} is not usable; give at least 1")
    if not 0 <= tail < 1:
        raise ValueError(f"tail: {tail} is not usable; give a number from 0 and below 1")
    if d2t is not None and len(d2t) != logits.shape[1]:
        raise ValueError(
            f"d2t: {len(d2t)} entries are not usable; the logits have {logits.shape[1]} columns"
        )
    if vocab_size is not None and vocab_size < logits.shape[1]:
        logits = logits[:, :vocab_size]
    sampled = parameters.temperature > 0
    if bool(sampled.all()):
        drawn, counts, ids, weights, failed = _sample(logits, parameters, keys, tail, max_support)
    else:
        drawn, counts, ids, weights, failed = _draft_some_greedily(
            logits, parameters, keys, tail, max_support, sampled
        )
    if d2t is not None:
        drawn, ids = d2t[drawn], d2t[ids]
    cu_support = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    cu_support[1:] = counts.cumsum(0)
    return PackedDraft(
        token_ids=drawn.masked_fill(failed, NO_TOKEN).int(),
        cu_support=cu_support,
        support_ids=ids.int(),
        support_weights=weights,
        failed=failed,
    )


Drafted = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Draft ids int64 [B], support sizes int64 [B], support ids int64 [M] and weights float16 [M] in
draft ids, and which rows failed, bool [B]."""


def _sample(
    logits: Tensor, parameters: RowParameters, keys: DrawKeys, tail: float, max_support: int
) -> Drafted:
    p = filtered_probabilities(
        logits, parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p
    )
    failed = ~torch.isfinite(p[:, 0])
    if bool(failed.any()):
        p = p.masked_fill(failed[:, None], 0)
    largest, ids = torch.topk(p, min(max_support, p.shape[1]), dim=-1)  # [B, S], descending
    # An entry belongs to the smallest sufficient support if those before it leave out too much.
    before = largest.double().cumsum(dim=-1) - largest
    weights = round_down(largest.masked_fill_(before >= 1 - tail, 0))
    units = (weights.double() * UNITS).long()
    drawn = ids.gather(1, draw(units, keys)[:, None])[:, 0]
    kept = units > 0
    counts = kept.sum(dim=-1)
    if bool(((counts == 0) & ~failed).any()):
        raise ValueError(
            f"logits: {p.shape[1]} columns are not usable; a law so flat rounds to nothing"
        )
    return drawn, counts, ids[kept], weights[kept], failed


def _draft_some_greedily(
    logits: Tensor,
    parameters: RowParameters,
    keys: DrawKeys,
    tail: float,
    max_support: int,
    sampled: Tensor,
) -> Drafted:
    peaks, drawn = logits.max(dim=-1)
    counts = torch.zeros_like(drawn)
    failed = ~torch.isfinite(peaks)
    rows = sampled.nonzero()[:, 0]
    ids = drawn.new_empty(0)
    weights = torch.empty(0, dtype=torch.float16, device=logits.device)
    if len(rows):
        drawn[rows], counts[rows], ids, weights, failed[rows] = _sample(
            logits[rows],
            RowParameters(
                temperature=parameters.temperature[rows],
                top_k=parameters.top_k[rows],
                top_p=parameters.top_p[rows],
                min_p=parameters.min_p[rows],
            ),
            DrawKeys(
                seeds=keys.seeds[rows],
                sample_indices=keys.sample_indices[rows],
                base_lengths=keys.base_lengths[rows],
                positions=keys.positions[rows],
            ),
            tail,
            max_support,
        )
    return drawn, counts, ids, weights, failed


def round_down(p: Tensor) -> Tensor:
    """The largest float16 weights that are at most p and sum to at most 1.

    Args:
        p: float32 [B, S], descending, not negative; a row sums to 1 but for rounding.

    Returns:
        float16 [B, S].
    """
    bits = p.half().view(torch.int16)  # of numbers >= 0: the next smaller one is one less
    bits = bits - (bits.view(torch.float16).float() > p).to(torch.int16)
    # A float32 softmax may sum to a little more than 1. The excess is some 2**-20 at most, a step
    # of the largest weight more than that.
    sums = bits.view(torch.float16).sum(dim=-1, dtype=torch.float64)
    bits[:, 0] -= (sums > 1).to(torch.int16)
    return bits.view(torch.float16)


def draw(units: Tensor, keys: DrawKeys) -> Tensor:
    """Draws an index a row with probability units / their sum, to 2**-40, by integers alone.

    Args:
        units: int64 [B, S], not negative, at most UNITS in a row. A row of zeros gives its
            last index.
        keys: one row a draw.
    """
    high, low = random_words(
        keys.seeds, keys.sample_indices, keys.base_lengths, keys.positions, Purpose.DRAFT
    )
    sums = units.cumsum(dim=-1)
    total = sums[:, -1]
    drawn = (high * total + (low * total >> 32)) >> 32  # floor(64 bits * total / 2**64)
    return (sums <= drawn[:, None]).sum(dim=-1).clamp_(max=units.shape[1] - 1)
