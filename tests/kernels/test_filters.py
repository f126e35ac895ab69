"""The filters against transformers' own warpers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.rejection import RowParameters
from tests.kernels.batches import parameters

SETTINGS = [
    (temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.3, 1e-4), (0.0, 0.1, 1.0)
    )
]


def ours(logits: Tensor, p: RowParameters) -> Tensor:
    return filtered_probabilities(logits, p.temperature, p.top_k, p.top_p, p.min_p)


def theirs(logits: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    temperature, top_k, top_p, min_p = setting
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        logits = warper(torch.empty(0, dtype=torch.long), logits)
    return torch.softmax(logits, dim=-1)


TIED = slice(6, 13)


def rows(vocab_size: int) -> Tensor:
    """Random rows, coarse rows full of ties, flat rows, and rows with masks."""
    generator = torch.Generator().manual_seed(1)
    smooth = torch.randn(6, vocab_size, generator=generator) * 3
    coarse = torch.randint(0, 4, (6, vocab_size), generator=generator).float()
    flat = torch.zeros(1, vocab_size)
    masked = smooth[:2].masked_fill(
        torch.rand(2, vocab_size, generator=generator) < 0.5, -torch.inf
    )
    return torch.cat((smooth, coarse, flat, masked))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_law_is_that_of_transformers(setting: tuple[float, int, float, float]) -> None:
    logits = rows(61)
    temperature, top_k, top_p, min_p = setting
    count = len(logits)
    got = ours(logits, parameters(*[temperature] * count, top_k=top_k, top_p=top_p, min_p=min_p))
    want = theirs(logits.double(), setting).float()
    # Which of several equal logits survives is left to an unstable sort there.
    torch.testing.assert_close(got.sort().values, want.sort().values, rtol=5e-6, atol=0)
    distinct = TIED.stop <= torch.arange(count)
    distinct |= torch.arange(count) < TIED.start
    assert torch.equal(got[distinct] > 0, want[distinct] > 0)
    torch.testing.assert_close(got[distinct], want[distinct], rtol=5e-6, atol=0)


def test_a_wrong_order_of_filters_is_caught() -> None:
    """Control: min-p before temperature keeps other words than transformers does."""
    logits = rows(61)[:6]
    hot = theirs(logits, (3.0, 0, 1.0, 0.1)) > 0
    cold = theirs(logits, (1.0, 0, 1.0, 0.1)) > 0
    got = ours(logits, parameters(*[3.0] * 6, min_p=0.1)) > 0
    assert torch.equal(got, hot) and not torch.equal(got, cold)


@pytest.mark.parametrize("vocab_size", [61, 9000])
def test_of_ties_the_lower_ids_are_kept(vocab_size: int) -> None:
    """A nucleus so small that it holds one word is the greedy choice."""
    logits = torch.full((1, vocab_size), -1.0)
    logits[0, 7:47] = 2.0
    got = ours(logits, parameters(1.0, top_p=1e-4))
    assert (got > 0).nonzero()[:, 1].tolist() == [7] == logits.argmax(-1).tolist()


def test_rows_with_different_settings_share_a_batch() -> None:
    logits = torch.randn(len(SETTINGS), 61, generator=torch.Generator().manual_seed(2)) * 3
    temperatures, top_ks, top_ps, min_ps = zip(*SETTINGS, strict=True)
    got = ours(logits, parameters(*temperatures, top_k=top_ks, top_p=top_ps, min_p=min_ps))
    for i, setting in enumerate(SETTINGS):
        torch.testing.assert_close(got[i : i + 1], theirs(logits[i : i + 1], setting))
        one = parameters(temperatures[i], top_k=top_ks[i], top_p=(top_ps[i],), min_p=(min_ps[i],))
        assert torch.equal(got[i : i + 1], ours(logits[i : i + 1], one))


@pytest.mark.parametrize("scale", [8.0, 4.0, 1.0, 0.0])
@pytest.mark.parametrize("top_p", [0.95, 0.5])
def test_a_nucleus_in_a_wide_row(scale: float, top_p: float) -> None:
    """Peaked rows are settled among the largest logits, flat ones by a sort of the whole row."""
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(3)) * scale
    got = ours(logits, parameters(1.0, 1.0, 1.0, top_p=top_p))
    want = theirs(logits.double(), (1.0, 0, top_p, 0.0)).float()
    # The border may fall to either side of one token by the rounding of a sum.
    if scale:
        assert ((got > 0) != (want > 0)).sum(dim=-1).max() <= 1
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    else:
        assert (got > 0).sum(dim=-1).tolist() == [20_000 * top_p] * 3


def test_ties_across_the_candidates_of_a_wide_row() -> None:
    """3,000 equal logits: half of them are the nucleus, the ones with the lower ids."""
    logits = torch.full((1, 9000), -torch.inf)
    logits[0, 1000:4000] = 2.0
    got = ours(logits, parameters(1.0, top_p=0.5))
    assert (got > 0).nonzero()[:, 1].tolist() == list(range(1000, 2500))


def test_the_caller_keeps_its_logits() -> None:
    logits = rows(61)
    before = logits.clone()
    for setting in SETTINGS[::7]:
        temperature, top_k, top_p, min_p = setting
        ours(
            logits,
            parameters(*[temperature] * len(logits), top_k=top_k, top_p=top_p, min_p=min_p),
        )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (0.7, 5, 0.9, 0.1), (1.0, 0, 0.9, 0.0)])
@pytest.mark.parametrize("vocab_size", [61, 5000])
def test_a_row_that_is_not_finite_is_nan_and_alone(
    vocab_size: int, setting: tuple[float, int, float, float]
) -> None:
    generator = torch.Generator().manual_seed(4)
    sound = torch.randn(1, vocab_size, generator=generator)
    broken = [torch.full((1, vocab_size), -torch.inf)]
    for value in (torch.nan, torch.inf):
        broken.append(torch.full((1, vocab_size), value))
        for place in (0, 7, 16, 33, vocab_size - 1):
            row = sound.clone()
            row[0, place] = value
            broken.append(row)
    temperature, top_k, top_p, min_p = setting
    batch = torch.cat([sound, *broken, sound])
    count = len(batch)
    got = ours(batch, parameters(*[temperature] * count, top_k=top_k, top_p=top_p, min_p=min_p))
    assert got[1:-1].isnan().all()
    alone = ours(sound, parameters(temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(got[:1], alone) and torch.equal(got[-1:], alone)
