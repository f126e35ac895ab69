"""Draft logits to a draft token and the packed law that it was drawn from.

The law is cut to the smallest support whose tail is within a bound, rounded down to float16, and
only then sampled: what is shipped is exactly what was drawn from (invariant: q is what was
sampled). Every float16 is a multiple of 2**-24, so the weights are whole numbers of 2**-24, sums
of them are exact in any order, and the inverse of their cumulative sum is taken in integers.

Axes: B rows, V' words of the draft vocabulary, C candidates of a row, M support entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.philox import Purpose, random_words
from outrider.kernels.rejection import NO_TOKEN, DrawKeys, RowParameters

WEIGHT_UNITS = 2**24
# float32 probabilities may sum to a little more than 1; shrunk by this much, weights never do.
_SHRINK = 1 - 2.0**-18


@dataclass(frozen=True)
class PackedDraft:
    """One drafted token a row, in target ids.

    A greedy row has an empty support. A row whose logits were not finite has NO_TOKEN and none.
    """

    token_ids: Tensor  # int32 [B]
    cu_support: Tensor  # int32 [B+1]
    support_ids: Tensor  # int32 [M]
    support_weights: Tensor  # float16 [M]


def draft_and_pack(
    logits: Tensor,
    parameters: RowParameters,
    keys: DrawKeys,
    d2t: Tensor | None,
    *,
    tail: float = 0.01,
    max_support: int = 240,
) -> PackedDraft:
    """Draws one token a row and packs its law.

    Args:
        logits: [B, V'], any float type.
        parameters: one row each.
        keys: one row each; the DRAFT number of seed, sample index, base length and position.
        d2t: int64 [V'], the target id of each draft id, or None where they are the same.
        tail: the mass that a support may leave out.
        max_support: the entries it may hold.
    """
    sampled = parameters.temperature > 0  # [B]
    if bool(sampled.all()):
        token, support, weights = _sample(logits, parameters, keys, tail, max_support)
    else:
        token, support, weights = _mixed(logits, sampled, parameters, keys, tail, max_support)
    if d2t is not None:
        real = token >= 0
        token = torch.where(real, d2t[token.clamp(min=0)], token)
        support = d2t[support]
    held = weights > 0  # [B, C]
    bounds = torch.zeros(len(token) + 1, dtype=torch.int32, device=logits.device)
    torch.cumsum(held.sum(-1), 0, out=bounds[1:])
    return PackedDraft(token.int(), bounds, support[held].int(), weights[held])


def _mixed(
    logits: Tensor,
    sampled: Tensor,
    parameters: RowParameters,
    keys: DrawKeys,
    tail: float,
    max_support: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy rows take the argmax; the others are sampled among themselves."""
    broken = torch.isnan(logits).any(-1) | (logits.amax(-1).isinf())
    token = torch.where(broken, NO_TOKEN, logits.argmax(-1))
    rows = sampled.nonzero()[:, 0]
    width = min(max_support, logits.shape[1])
    support = torch.zeros(len(token), width, dtype=torch.long, device=logits.device)
    weights = torch.zeros(len(token), width, dtype=torch.float16, device=logits.device)
    if len(rows):
        drawn = _sample(
            logits[rows],
            RowParameters(*(getattr(parameters, f)[rows] for f in _PARAMETERS)),
            DrawKeys(*(getattr(keys, f)[rows] for f in _KEYS)),
            tail,
            max_support,
        )
        token[rows], support[rows], weights[rows] = drawn
    return token, support, weights


_PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
_KEYS = ("seeds", "sample_indices", "base_lengths", "positions")


def _sample(
    logits: Tensor, parameters: RowParameters, keys: DrawKeys, tail: float, max_support: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [B], candidates int64 [B, C] and their weights float16 [B, C], 0 if cut."""
    p = filtered_probabilities(
        logits, parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p
    )
    top, support = torch.topk(p, min(max_support, p.shape[1]), dim=-1)  # descending
    weights = round_down(top * _SHRINK)
    before = top.double().cumsum(-1) - top  # the mass ahead of each candidate
    weights.masked_fill_(1 - before <= tail, 0.0)
    units = (weights.double() * WEIGHT_UNITS).long()  # NaN comes out as nonsense, masked below
    broken = torch.isnan(top[:, 0])
    units.masked_fill_(broken[:, None], 0)
    weights = torch.where(broken[:, None], torch.zeros_like(weights), weights)
    sums = units.cumsum(-1)
    high, low = random_words(
        keys.seeds, keys.sample_indices, keys.base_lengths, keys.positions, Purpose.DRAFT
    )
    draw = scale_draw(high, low, sums[:, -1])
    place = (sums <= draw[:, None]).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    token = support.gather(1, place)[:, 0]
    return torch.where(broken, NO_TOKEN, token), support, weights


def round_down(p: Tensor) -> Tensor:
    """float32 probabilities in [0, 1] -> float16, towards 0."""
    nearest = p.half()
    above = nearest.float() > p
    # Positive float16 are ordered like their bits: one less is the next value below.
    return (nearest.view(torch.int16) - above.to(torch.int16)).view(torch.float16)


def scale_draw(high: Tensor, low: Tensor, total: Tensor) -> Tensor:
    """floor(bits * total / 2**64) of 64 random bits, exactly: uniform on 0..total-1 to 2**-40.

    Args:
        high, low: int64 words below 2**32; total: int64 below 2**25.
    """
    return (high * total + (low * total >> 32)) >> 32
