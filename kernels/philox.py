"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3"), the same on every device and in every batch.

A number is a function of its key alone: the request's seed, its sample index, a position, a base
length, a purpose and an index. Nothing is stored, so nothing can be shared by accident, consumed
by a neighbour or lost in a restart.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORDS = 4
MAX_SAMPLE_INDEX = 2**24 - 1

# Up to so many counters on the CPU, plain integers are faster than hundreds of tensor operations.
_FEW = 12


class Purpose(IntEnum):
    """What a number is for. No two purposes ever see the same number."""

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3  # the recovered token and the bonus token: a round draws one of them
    GUMBEL = 4


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four random words for each counter.

    Args:
        counter: int64 [..., 4], words from 0 to 2**32 - 1.
        key: int64 [..., 2], words from 0 to 2**32 - 1; broadcast against the counters.

    Returns:
        int64 [..., 4], words from 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = counter[None].unbind(-1)
    k0, k1 = key[None].unbind(-1)
    return torch.stack(_rounds(c0, c1, c2, c3, k0, k1), dim=-1)[0]


def random_words(
    seeds: Tensor, sample_indices: Tensor, base_lengths: Tensor, positions: Tensor, purpose: Purpose
) -> tuple[Tensor, Tensor]:
    """Two random words for each draw that needs one number.

    Args:
        seeds: int64 [N], all 64 bits used.
        sample_indices: integers [N] from 0 to MAX_SAMPLE_INDEX.
        base_lengths: integers [N] >= 0.
        positions: integers [N] >= 0.
        purpose: what the numbers are for.

    Returns:
        int64 [N] twice, words from 0 to 2**32 - 1; the first is the more significant.
    """
    if seeds.device.type == "cpu" and len(seeds) <= _FEW:
        rows = zip(
            seeds.tolist(),
            sample_indices.tolist(),
            base_lengths.tolist(),
            positions.tolist(),
            strict=True,
        )
        drawn = [
            _one(0, position, base, purpose << 24 | sample, seed & MASK, seed >> 32 & MASK)
            for seed, sample, base, position in rows
        ]
        both = torch.tensor(drawn, dtype=torch.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]
    low, high = _key(seeds)
    words = _rounds(
        torch.zeros_like(seeds),
        positions.long(),
        base_lengths.long(),
        _tag(sample_indices, purpose),
        low,
        high,
    )
    return words[0], words[1]


def unit_interval(words: Tensor) -> Tensor:
    """Uniform float64 numbers strictly between 0 and 1: (word + 1/2) / 2**32."""
    return words.double().add_(0.5).mul_(2.0**-32)


def negative_exponentials(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, purpose: Purpose, size: int
) -> Tensor:
    """Exponential variables with the sign turned, log(1 - u), one for each of `size` indices.

    Index i takes word i % 4 of counter i // 4, so a longer row begins with the shorter one. The
    base length is 0 in these keys. Never 0, never infinite.

    Args:
        seeds: int64 [B].
        sample_indices: integers [B].
        positions: integers [B].
        purpose: what the numbers are for.
        size: how many numbers a row.

    Returns:
        float64 [B, size].
    """
    counters = torch.arange((size + WORDS - 1) // WORDS, device=seeds.device)
    low, high = _key(seeds)
    words = _rounds(
        counters[None, :],
        positions.long()[:, None],
        torch.zeros_like(seeds)[:, None],
        _tag(sample_indices, purpose)[:, None],
        low[:, None],
        high[:, None],
    )
    shape = (len(seeds), len(counters), WORDS)
    numbers = torch.empty(shape, dtype=torch.float64, device=seeds.device)
    for lane, word in enumerate(words):
        numbers[..., lane] = word
    return _log_of_complement(numbers).flatten(1)[:, :size]


def negative_exponentials_at(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, purpose: Purpose, indices: Tensor
) -> Tensor:
    """The numbers of `negative_exponentials` at one index of each row: float64 [N]."""
    low, high = _key(seeds)
    words = _rounds(
        indices // WORDS,
        positions.long(),
        torch.zeros_like(seeds),
        _tag(sample_indices, purpose),
        low,
        high,
    )
    lanes = torch.stack(words).gather(0, (indices % WORDS)[None, :])[0]
    return _log_of_complement(lanes.double())


def _log_of_complement(words: Tensor) -> Tensor:
    """log(1 - u) of float64 words, in place."""
    return words.add_(0.5).mul_(-(2.0**-32)).log1p_()


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & MASK, seeds >> 32 & MASK


def _tag(sample_indices: Tensor, purpose: Purpose) -> Tensor:
    return sample_indices.long() | int(purpose) << 24


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, ...]:
    """The ten rounds on broadcastable int64 tensors."""
    words = (c0, c1, c2, c3, k0, k1)
    if c0.device.type != "cpu":
        return _ten_rounds(*words)
    # The same operators on the same memory; numpy's are twice as fast there.
    return tuple(torch.from_numpy(word) for word in _ten_rounds(*(w.numpy() for w in words)))


def _ten_rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """On tensors or arrays of int64.

    A product of two words wraps into the sign bit; its low word and, after the mask, its high
    word are still right. c1 and c3 keep garbage above their 32 bits until they are used in an
    exclusive or that is masked anyway.
    """
    for turn in range(ROUNDS):
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        c0 = (p1 >> 32) ^ (c1 ^ (k0 + WEYL[0] * turn))
        c2 = (p0 >> 32) ^ (c3 ^ (k1 + WEYL[1] * turn))
        c0 &= MASK
        c2 &= MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


def _one(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int]:
    """The first two words of one counter, in plain integers."""
    for turn in range(ROUNDS):
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        c0 = p1 >> 32 ^ c1 ^ (k0 + WEYL[0] * turn & MASK)
        c2 = p0 >> 32 ^ c3 ^ (k1 + WEYL[1] * turn & MASK)
        c1, c3 = p1 & MASK, p0 & MASK
    return c0, c1
