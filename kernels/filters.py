"""Temperature, top-k, top-p and min-p: from a row of logits to the law that is sampled.

The meaning is that of transformers' warpers in the order in which `generate` applies them. Each
row is a function of that row and its own parameters alone, bit for bit, whatever else is in the
batch: the law of a token must not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# A nucleus is looked for among so many largest logits, and more, before the whole row is sorted.
_CANDIDATES = (1024, 8192)


def filtered_probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The law of each row.

    Args:
        logits: [R, V], any float type. -inf is a mask. A row with NaN, with +inf, or of nothing
            but -inf comes out as all NaN and disturbs no other.
        temperature: float32 [R], above 0.
        top_k: int32 [R], 0 is off. Ties at the border are kept.
        top_p: float32 [R], 1 is off. Of ties at the border the lower ids are kept (where
            transformers leaves it to an unstable sort).
        min_p: float32 [R], 0 is off.

    Returns:
        float32 [R, V].
    """
    scores = logits.float()
    if bool((temperature != 1).any()):
        scores = scores / temperature[:, None]
    # From here on `scores` may be the caller's own tensor: no step below writes to it.
    limited = (top_k > 0) & (top_k < scores.shape[1])
    scores = _on_rows(limited, scores, top_k, _top_k)
    scores = _on_rows(top_p < 1, scores, top_p, _top_p)
    scores = _on_rows(min_p > 0, scores, min_p, _min_p)
    return torch.softmax(scores, dim=-1)


def _on_rows(
    wanted: Tensor, scores: Tensor, parameter: Tensor, warp: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The scores with the wanted rows warped. The others keep their bits."""
    if not bool(wanted.any()):
        return scores
    if bool(wanted.all()):
        return warp(scores, parameter)
    rows = wanted.nonzero()[:, 0]
    return scores.index_copy(0, rows, warp(scores[rows], parameter[rows]))


def _top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    largest = torch.topk(scores, int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, top_k.long()[:, None] - 1)
    return _without(scores, scores < threshold)


def _min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    probabilities = torch.softmax(scores, dim=-1)
    largest = probabilities.amax(dim=-1, keepdim=True)
    return _without(scores, probabilities < min_p[:, None] * largest)


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    return _nucleus(scores, 1 - top_p.double(), _CANDIDATES)


def _nucleus(scores: Tensor, tail: Tensor, candidates: tuple[int, ...]) -> Tensor:
    """Found among a few candidates in the rows where that is provably the whole answer."""
    if not candidates or scores.shape[1] <= 2 * candidates[0]:
        return _top_p_sorted(scores, tail)
    kept, settled = _top_p_of_candidates(scores, tail, candidates[0])
    if bool(settled.all()):
        return kept
    rows = (~settled).nonzero()[:, 0]
    return kept.index_copy(0, rows, _nucleus(scores[rows], tail[rows], candidates[1:]))


def _top_p_sorted(scores: Tensor, tail: Tensor) -> Tensor:
    descending, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ascending = torch.softmax(descending, dim=-1).flip(-1)
    remove = (ascending.cumsum(dim=-1, dtype=torch.float64) <= tail[:, None]).flip(-1)
    remove[:, 0] = False
    return _without(scores, torch.empty_like(remove).scatter_(1, order, remove))


def _top_p_of_candidates(scores: Tensor, tail: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """The nucleus by a threshold on probabilities, and for which rows it is certain.

    It is where the nucleus ends among the candidates and the token after its last is no tie.
    """
    probabilities = torch.softmax(scores, dim=-1)
    largest = torch.topk(probabilities, candidates, dim=-1).values  # [R, C], descending
    below = 1 - largest.cumsum(dim=-1, dtype=torch.float64)  # the mass after candidate i
    kept_counts = (below > tail[:, None]).sum(dim=-1, keepdim=True) + 1  # [R, 1]
    last = (kept_counts - 1).clamp_(max=candidates - 2)
    border = largest.gather(1, last)
    certain = (kept_counts < candidates) & (largest.gather(1, last + 1) < border)
    return _without(scores, probabilities < border), certain[:, 0]


def _without(scores: Tensor, removed: Tensor) -> Tensor:
    return scores.masked_fill(removed, float("-inf"))
