"""Builds the ragged tensors of the samplers from plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.kernels.draft_sampling import PackedDraft
from outrider.kernels.rejection import DraftTokens, DrawKeys, RowParameters

# A draft token and its law: word -> weight, or nothing for a missing or deterministic one.
Draft = tuple[int, Mapping[int, float]]
MAXIMUM = 2**32 - 1


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def parameters(
    *temperatures: float,
    top_k: Sequence[int] | int = 0,
    top_p: Sequence[float] | float = 1.0,
    min_p: Sequence[float] | float = 0.0,
) -> RowParameters:
    count = len(temperatures)
    return RowParameters(
        temperature=torch.tensor(temperatures),
        top_k=int32([top_k] * count if isinstance(top_k, int) else top_k),
        top_p=torch.tensor([top_p] * count if isinstance(top_p, float) else top_p),
        min_p=torch.tensor([min_p] * count if isinstance(min_p, float) else min_p),
    )


def repeated(temperature: float, count: int) -> RowParameters:
    return parameters(*([temperature] * count))


def keys(
    seeds: Sequence[int], base_lengths: Sequence[int] | int = 7, positions: int | None = None
) -> DrawKeys:
    bases = [base_lengths] * len(seeds) if isinstance(base_lengths, int) else base_lengths
    return DrawKeys(
        seeds=torch.tensor(list(seeds), dtype=torch.int64),
        sample_indices=int32([0] * len(seeds)),
        base_lengths=int32(bases),
        positions=int32(bases if positions is None else [positions] * len(seeds)),
    )


def many_keys(count: int, first: int = 0, base_length: int = 7) -> DrawKeys:
    """As many independent requests: one seed, counting sample indices as `n` samples would."""
    return DrawKeys(
        seeds=torch.full((count,), 1234567, dtype=torch.int64),
        sample_indices=torch.arange(first, first + count, dtype=torch.int32),
        base_lengths=torch.full((count,), base_length, dtype=torch.int32),
        positions=torch.full((count,), base_length, dtype=torch.int32),
    )


def drafts(
    chains: Sequence[Sequence[Draft]], deterministic: Sequence[bool] | bool = False
) -> DraftTokens:
    tokens = [draft for chain in chains for draft in chain]
    if isinstance(deterministic, bool):
        deterministic = [deterministic] * len(chains)
    return DraftTokens(
        cu_num_draft_tokens=running_sums([len(chain) for chain in chains]),
        token_ids=int32([token for token, _ in tokens]),
        cu_support=running_sums([len(law) for _, law in tokens]),
        support_ids=int32([word for _, law in tokens for word in law]),
        support_weights=torch.tensor(
            [weight for _, law in tokens for weight in law.values()], dtype=torch.float32
        ),
        deterministic=torch.tensor(deterministic, dtype=torch.bool),
    )


def chained(steps: Sequence[PackedDraft]) -> DraftTokens:
    """The chains that come of drafting step by step, every request at every step."""
    requests, length = len(steps[0].token_ids), len(steps)
    sizes = torch.stack([step.cu_support.diff() for step in steps], dim=1).flatten()  # [B * K]
    order = torch.cat(
        [
            torch.arange(requests).repeat_interleave(step.cu_support.diff().long()) * length + j
            for j, step in enumerate(steps)
        ]
    ).argsort(stable=True)
    return DraftTokens(
        cu_num_draft_tokens=torch.arange(requests + 1, dtype=torch.int32) * length,
        token_ids=torch.stack([step.token_ids for step in steps], dim=1).flatten(),
        cu_support=running_sums(sizes.tolist()),
        support_ids=torch.cat([step.support_ids for step in steps])[order],
        support_weights=torch.cat([step.support_weights for step in steps]).float()[order],
        deterministic=torch.zeros(requests, dtype=torch.bool),
    )


def running_sums(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).int()


def q_dense(packed: PackedDraft, vocab_size: int) -> Tensor:
    """float64 [B, V], the law that was shipped."""
    q = torch.zeros(len(packed.token_ids), vocab_size, dtype=torch.float64)
    rows = torch.arange(len(q)).repeat_interleave(packed.cu_support.diff().long())
    q[rows, packed.support_ids.long()] = packed.support_weights.double()
    return q / q.sum(dim=-1, keepdim=True)
