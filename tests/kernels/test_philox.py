from __future__ import annotations

import itertools
import math

import pytest
import torch

from outrider.kernels.philox import (
    Purpose,
    negative_exponentials,
    negative_exponentials_at,
    philox4x32,
    random_words,
    unit_interval,
)

ONES = 0xFFFFFFFF
# The known answers that Random123 publishes: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == list(words)


def test_known_answers_in_one_batch() -> None:
    counters = torch.tensor([row[0] for row in KNOWN])
    keys = torch.tensor([row[1] for row in KNOWN])
    assert philox4x32(counters, keys).tolist() == [list(row[2]) for row in KNOWN]


def test_the_key_layout() -> None:
    """Counter words: index, position, base length, purpose << 24 | sample index."""
    seed = -0x123456789ABCDEF
    unsigned = seed % 2**64
    key = torch.tensor([unsigned & ONES, unsigned >> 32])
    sample, base, position = 2**24 - 1, 77, 80
    want = philox4x32(torch.tensor([0, position, base, 2 << 24 | sample]), key)
    got = random_words(
        torch.tensor([seed]),
        torch.tensor([sample]),
        torch.tensor([base]),
        torch.tensor([position]),
        Purpose.ACCEPT,
    )
    assert [int(word) for word in got] == want[:2].tolist()
    words = philox4x32(torch.tensor([5, position, 0, 3 << 24 | sample]), key)
    times = negative_exponentials(
        torch.tensor([seed]), torch.tensor([sample]), torch.tensor([position]), Purpose.RECOVER, 30
    )
    for lane in range(4):
        u = (int(words[lane]) + 0.5) / 2**32
        assert float(times[0, 20 + lane]) == pytest.approx(math.log1p(-u), rel=1e-15)


def some_keys(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    samples, bases, positions = torch.randint(0, 2**24, (3, count), generator=generator)
    return seeds, samples, bases, positions


def test_few_and_many_draws_give_the_same_numbers() -> None:
    """Few counters take another path through the code than many do."""
    seeds, samples, bases, positions = some_keys(100)
    many = random_words(seeds, samples, bases, positions, Purpose.DRAFT)
    for size in (0, 1, 12, 13):
        few = random_words(
            seeds[:size], samples[:size], bases[:size], positions[:size], Purpose.DRAFT
        )
        for word in range(2):
            assert torch.equal(few[word], many[word][:size])


def test_one_index_gives_the_number_of_the_whole_row() -> None:
    seeds, samples, _, positions = some_keys(50)
    rows = negative_exponentials(seeds, samples, positions, Purpose.RECOVER, 101)
    indices = torch.arange(50) * 2
    some = negative_exponentials_at(seeds, samples, positions, Purpose.RECOVER, indices)
    assert torch.equal(some, rows[torch.arange(50), indices])
    longer = negative_exponentials(seeds, samples, positions, Purpose.RECOVER, 4000)
    assert torch.equal(longer[:, :101], rows)


def test_no_two_keys_share_numbers() -> None:
    """Two words of 64 bits collide by chance with probability 1e-13 here."""
    grid = list(
        itertools.product((0, 1, -1, 2**32), (0, 1, 2**24 - 1), (0, 1, 9), (0, 1, 9), Purpose)
    )
    seen = set()
    for seed, sample, base, position, purpose in grid:
        high, low = random_words(
            torch.tensor([seed]),
            torch.tensor([sample]),
            torch.tensor([base]),
            torch.tensor([position]),
            purpose,
        )
        seen.add((int(high), int(low)))
    assert len(seen) == len(grid)


def test_uniforms_lie_strictly_inside_and_exponentials_are_neither_zero_nor_infinite() -> None:
    u = unit_interval(torch.tensor([0, 2**31, ONES]))
    assert u.tolist() == [2.0**-33, 0.5 + 2.0**-33, 1 - 2.0**-33]
    seeds, samples, _, positions = some_keys(20)
    times = -negative_exponentials(seeds, samples, positions, Purpose.RECOVER, 50_000)
    assert float(times.min()) >= 2.0**-33 and float(times.max()) <= 33 * math.log(2)
    # A million draws: mean and second moment within five standard errors.
    assert float(times.mean()) == pytest.approx(1, abs=5 / 1000)
    assert float((times**2).mean()) == pytest.approx(2, abs=5 * math.sqrt(20) / 1000)
