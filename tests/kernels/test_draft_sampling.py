from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels import draft_sampling
from outrider.kernels.draft_sampling import UNITS, draft_and_pack, draw, round_down
from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.rejection import NO_TOKEN, RowParameters
from tests.kernels.batches import MAXIMUM, keys, many_keys, parameters, q_dense, repeated


def random_logits(rows: int, columns: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def law(logits: Tensor, p: RowParameters) -> Tensor:
    return filtered_probabilities(logits.double(), p.temperature, p.top_k, p.top_p, p.min_p)


def test_the_support_is_the_smallest_with_a_tail_below_the_bound() -> None:
    logits = random_logits(40, 300)
    packed = draft_and_pack(logits, repeated(1.0, 40), many_keys(40), tail=0.05)
    p = law(logits, repeated(1.0, 40))
    for row, (start, end) in enumerate(packed.cu_support.unfold(0, 2, 1).tolist()):
        kept = p[row, packed.support_ids[start:end].long()].double()
        assert kept.sum() >= 0.95 - 1e-6
        assert kept.sum() - kept.min() < 0.95
        assert torch.equal(kept, p[row].double().sort(descending=True).values[: end - start])


def test_the_support_is_capped_and_flat_laws_lose_their_tail() -> None:
    packed = draft_and_pack(torch.zeros(2, 1000), repeated(1.0, 2), many_keys(2), max_support=16)
    assert packed.cu_support.tolist() == [0, 16, 32]


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 12.0])
def test_weights_are_float16_rounded_down_and_sum_to_at_most_one(scale: float) -> None:
    logits = random_logits(200, 240, scale)
    packed = draft_and_pack(logits, repeated(1.0, 200), many_keys(200), tail=0.0)
    p = law(logits, repeated(1.0, 200))
    rows = torch.arange(200).repeat_interleave(packed.cu_support.diff().long())
    weights = packed.support_weights
    exact = p[rows, packed.support_ids.long()]
    assert weights.dtype == torch.float16 and bool((weights > 0).all())
    assert bool((weights.double() <= exact.double() * (1 + 1e-6)).all())
    assert bool((weights.double() >= exact.double() * (1 - 2.0**-10) - 1 / UNITS).all())
    for order in (torch.arange(len(rows)), torch.randperm(len(rows))):
        sums = torch.zeros(200).index_add(0, rows[order], weights.float()[order])
        assert bool((sums <= 1).all())
        assert torch.equal(sums.double() * UNITS, (sums.double() * UNITS).round())


def test_rounding_up_a_sum_is_undone() -> None:
    """A float32 softmax may sum to more than 1. Control: plain rounding keeps the excess."""
    p = torch.full((1, 200), 2.0**-24)
    p[0, 0] = 1 - 199 * 2.0**-24 + 2.0**-12
    p[0, 0] = p[0, 0].half().float()  # representable, so rounding down alone would keep it
    plain = p.half().double().sum()
    assert plain > 1
    assert round_down(p).double().sum() <= 1


def test_rounding_is_to_the_next_smaller_float16() -> None:
    p = torch.rand(1, 5000, generator=torch.Generator().manual_seed(1)) ** 8 / 5000
    p, _ = p.sort(descending=True)
    got = round_down(p)
    above = (got.view(torch.int16) + 1).view(torch.float16)
    assert bool((got.double() <= p.double()).all()) and bool((above.double() > p.double()).all())
    exact = torch.tensor([[0.5, 2.0**-24, 0.0]])
    assert round_down(exact).tolist() == exact.tolist()


def test_the_draw_is_exact_in_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is drawn by exactly the 64-bit words below its share of 2**64, rounded."""
    units = torch.tensor([[3, 1, 0, 5, 2**20 + 7]])
    total = int(units.sum())
    edges = units.cumsum(-1)[0].tolist()

    def drawn(word: int) -> int:
        monkeypatch.setattr(
            draft_sampling,
            "random_words",
            lambda *key: (torch.tensor([word >> 32]), torch.tensor([word & MAXIMUM])),
        )
        return int(draw(units, keys([0])))

    for index, edge in enumerate(edges[:-1]):
        first_beyond = -(-edge * 2**64 // total)
        beyond = next(i for i, e in enumerate(edges) if e > edge)
        before = next(i for i, e in enumerate(edges) if e >= edge)
        assert (drawn(first_beyond - 1), drawn(first_beyond)) == (before, beyond), index
    assert drawn(0) == 0 and drawn(2**64 - 1) == 4


def test_a_draw_never_lands_on_a_weight_of_zero() -> None:
    units = torch.tensor([[0, 2, 0, 1, 0]]).expand(20_000, -1)
    counts = draw(units, many_keys(20_000)).bincount(minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(int(counts[3]) - 20_000 / 3) < 5 * (20_000 * 2 / 9) ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a1_the_law_that_is_shipped_is_the_filtered_one(temperature: float) -> None:
    """Control: the law without the filters, which is what others shipped, differs widely."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    options = parameters(temperature, top_k=2)
    packed = draft_and_pack(logits, options, keys([1]), tail=0.0)
    shipped = q_dense(packed, 4)
    raw = torch.softmax(logits.double(), -1)
    powers = raw ** (1 / temperature)
    powers[0, 2:] = 0
    want = powers / powers.sum()
    assert 0.5 * (shipped - want).abs().sum() < 1e-3
    assert 0.5 * (shipped - raw).abs().sum() > 0.2


def test_a1_what_is_drawn_follows_what_is_shipped() -> None:
    """Drawn from a truncated law of two words: the dropped ones never come."""
    logits = torch.tensor([0.45, 0.3, 0.15, 0.1]).log().expand(40_000, -1)
    packed = draft_and_pack(logits, repeated(1.0, 40_000), many_keys(40_000), max_support=2)
    q = q_dense(packed, 4)[0]
    assert q.tolist() == pytest.approx([0.6, 0.4, 0, 0], abs=1e-3)
    counts = packed.token_ids.bincount(minlength=4)
    assert counts[2:].tolist() == [0, 0]
    assert abs(int(counts[0]) - 40_000 * float(q[0])) < 5 * (40_000 * 0.24) ** 0.5


def test_a2_a_greedy_draft_ships_no_law() -> None:
    """A one-hot law is said by an empty support; never is a softmax shipped with an argmax."""
    logits = random_logits(3, 50)
    packed = draft_and_pack(logits, parameters(0.0, 1.0, 0.0), many_keys(3))
    sizes = packed.cu_support.diff()
    assert sizes[[0, 2]].tolist() == [0, 0] and int(sizes[1]) > 0
    assert packed.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def test_a6_a_map_of_the_vocabulary_moves_the_law_too() -> None:
    """Even where both vocabularies are equally wide. Control: the law in draft order."""
    logits = random_logits(30, 64)
    d2t = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    plain = draft_and_pack(logits, repeated(1.0, 30), many_keys(30))
    mapped = draft_and_pack(logits, repeated(1.0, 30), many_keys(30), d2t)
    assert torch.equal(mapped.token_ids, d2t[plain.token_ids.long()].int())
    assert torch.equal(q_dense(mapped, 64)[:, d2t], q_dense(plain, 64))
    assert not torch.equal(q_dense(mapped, 64), q_dense(plain, 64))


def test_a6_a_reduced_vocabulary_of_two_words() -> None:
    logits = torch.tensor([[0.7, 0.3]]).log()
    packed = draft_and_pack(logits, parameters(1.0), keys([3]), torch.tensor([3, 1]))
    assert q_dense(packed, 4)[0].tolist() == pytest.approx([0, 0.3, 0, 0.7], abs=1e-3)
    assert int(packed.token_ids[0]) in (1, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b3_padded_columns_are_never_drafted(temperature: float) -> None:
    logits = random_logits(200, 64)
    logits[:, 61:] = 50.0
    options = repeated(temperature, 200)
    packed = draft_and_pack(logits, options, many_keys(200), vocab_size=61)
    assert int(packed.token_ids.max()) < 61
    assert not len(packed.support_ids) or int(packed.support_ids.max()) < 61
    same = draft_and_pack(logits[:, :61], options, many_keys(200))
    assert torch.equal(packed.token_ids, same.token_ids)
    unaware = draft_and_pack(logits, options, many_keys(200))  # control
    assert int(unaware.token_ids.min()) >= 61


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_fails_alone(value: float) -> None:
    logits = random_logits(4, 50)
    sound = draft_and_pack(logits, parameters(1.0, 1.0, 0.0, 0.0), many_keys(4))
    logits[1, 7] = logits[3, 9] = value
    packed = draft_and_pack(logits, parameters(1.0, 1.0, 0.0, 0.0), many_keys(4))
    assert packed.failed.tolist() == [False, True, False, True]
    assert packed.token_ids[[1, 3]].tolist() == [NO_TOKEN] * 2
    assert packed.cu_support.diff()[[1, 3]].tolist() == [0, 0]
    assert torch.equal(packed.token_ids[[0, 2]], sound.token_ids[[0, 2]])
    assert torch.equal(q_dense(packed, 50)[0], q_dense(sound, 50)[0])


def test_a_row_is_drafted_alike_alone_and_in_a_batch() -> None:
    logits = random_logits(9, 3000)
    options = parameters(
        1.0, 0.0, 0.7, 1.0, 1.0, 2.0, 0.0, 1.0, 1.3,
        top_k=[0, 0, 5, 0, 1, 50, 0, 0, 0],
        top_p=[1.0, 1.0, 0.9, 0.5, 1.0, 1.0, 1.0, 1.0, 0.99],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.3, 0.0],
    )  # fmt: skip
    every = keys(range(9), base_lengths=range(10, 19))
    together = draft_and_pack(logits, options, every)
    for row in range(9):
        one = slice(row, row + 1)
        alone = draft_and_pack(
            logits[one],
            RowParameters(
                options.temperature[one], options.top_k[one], options.top_p[one], options.min_p[one]
            ),
            keys([row], base_lengths=[row + 10]),
        )
        assert int(alone.token_ids[0]) == int(together.token_ids[row])
        start, end = together.cu_support[row : row + 2].tolist()
        assert torch.equal(alone.support_ids, together.support_ids[start:end])
        assert torch.equal(alone.support_weights, together.support_weights[start:end])


def test_arguments_that_cannot_be_meant_are_named() -> None:
    logits = random_logits(1, 8)
    for name, options in (
        ("max_support: 0", dict(max_support=0)),
        (r"tail: 1\.0", dict(tail=1.0)),
        ("d2t: 7 entries", dict(d2t=torch.arange(7))),
    ):
        with pytest.raises(ValueError, match=name):
            draft_and_pack(logits, parameters(1.0), keys([0]), **options)
