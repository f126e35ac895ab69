"""Exact laws of speculative sampling in float64, and a chi-square test with a known false-alarm
rate. Nothing here is drawn at random: laws are assembled from the acceptance rule and the residual
that they are given, so that a wrong rule shows by how much it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from outrider.kernels.rejection import accepts, residual

Accepts = Callable[[Tensor, Tensor, Tensor], Tensor]
# The weights of the recovered token: (p, q, rejected word) -> float64 [V].
Residual = Callable[[Tensor, Tensor, int], Tensor]
Law = npt.NDArray[np.float64]


def acceptance_probability(p: Tensor, q: Tensor, rule: Accepts = accepts) -> Tensor:
    """The measure of the numbers in (0, 1) that `rule` accepts, by bisection of its border."""
    low = torch.zeros(p.shape, dtype=torch.float64)
    high = torch.ones(p.shape, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        passed = rule(p, q, middle)
        low = torch.where(passed, middle, low)
        high = torch.where(passed, high, middle)
    return (low + high) / 2


def served_residual(p: Tensor, q: Tensor, rejected: int) -> Tensor:
    """The weights that the product draws the recovered token from."""
    words = q.nonzero()[:, 0]
    rows = torch.zeros_like(words)
    return residual(p.float()[None], rows, words, q.float()[words])[0].double()


def one_step_law(
    p: Tensor,
    drawn: Tensor,
    shipped: Tensor,
    rule: Accepts = accepts,
    weights: Residual = served_residual,
) -> Tensor:
    """The law of one token where drafts are drawn from `drawn` and judged with `shipped`."""
    law = torch.zeros(len(p), dtype=torch.float64)
    passing = acceptance_probability(p, shipped, rule)
    for word in drawn.nonzero()[:, 0].tolist():
        law[word] += drawn[word] * passing[word]
        rest = weights(p, shipped, word)
        if passing[word] < 1 and rest.sum() > 0:
            law += drawn[word] * (1 - passing[word]) * rest / rest.sum()
    return law


def variation(left: Tensor | Law, right: Tensor | Law) -> float:
    """Total variation distance."""
    return float(abs(np.asarray(left) - np.asarray(right)).sum() / 2)


def chi_square_p_value(counts: Sequence[int] | Law | Tensor, law: Law | Tensor) -> float:
    """How probable counts at least this far from their law are. Rare cells are pooled."""
    seen = np.asarray(counts, dtype=np.float64)
    expected = np.asarray(law, dtype=np.float64)
    expected = expected / expected.sum() * seen.sum()
    if seen[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    rare = int(np.searchsorted(np.cumsum(expected[order]), 10.0, side="right")) + 1
    pooled, rest = order[:rare], order[rare:]
    seen = np.append(seen[rest], seen[pooled].sum())
    expected = np.append(expected[rest], expected[pooled].sum())
    frequent = expected >= 5
    if not frequent.all():  # a second pool, of cells that are each too rare for the statistic
        seen = np.append(seen[frequent], seen[~frequent].sum())
        expected = np.append(expected[frequent], expected[~frequent].sum())
        seen, expected = seen[expected > 0], expected[expected > 0]
    return float(stats.chisquare(seen, expected, sum_check=False).pvalue)
