"""Turns drafts made step by step, request beside request, into one `DraftBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.kernels.draft_sampling import PackedDraft
from outrider.protos.messages import DraftBatch


@dataclass(frozen=True)
class DraftedStep:
    """One token for each entry listed; row i of `packed` belongs to entry `entries[i]`."""

    entries: tuple[int, ...]
    packed: PackedDraft


def assemble(
    steps: Sequence[DraftedStep],
    *,
    request_ids: Sequence[int],
    epochs: Sequence[int],
    base_lengths: Sequence[int],
    last_token_ids: Sequence[int],
    wide_ids: bool,
    service: str,
    sender: str,
    round_number: int,
    target_version: int,
    head_version: int,
) -> DraftBatch:
    """Concatenates entry by entry, each a chain in draft order."""
    chains: list[list[tuple[int, Any, Any]]] = [[] for _ in request_ids]
    for step in steps:
        tokens = step.packed.token_ids.cpu().numpy()
        bounds = step.packed.cu_support.cpu().numpy()
        ids = step.packed.support_ids.cpu().numpy()
        weights = step.packed.support_weights.cpu().numpy()
        failed = step.packed.failed.cpu().numpy()
        for row, entry in enumerate(step.entries):
            if failed[row]:
                continue  # logits that were not finite: the chain ends before this place
            span = slice(int(bounds[row]), int(bounds[row + 1]))
            chains[entry].append((int(tokens[row]), ids[span], weights[span]))
    flat = [token for chain in chains for token in chain]
    id_type = np.int32 if wide_ids else np.uint16
    return DraftBatch(
        service=service,
        sender=sender,
        round=round_number,
        target_version=target_version,
        head_version=head_version,
        deterministic=False,
        request_ids=np.array(request_ids, dtype=np.int64),
        epochs=np.array(epochs, dtype=np.int32),
        base_lengths=np.array(base_lengths, dtype=np.int32),
        last_token_ids=np.array(last_token_ids, dtype=np.int32),
        cu_num_draft_tokens=_starts([len(chain) for chain in chains]),
        token_ids=np.array([token for token, _, _ in flat], dtype=np.int32),
        parents=np.array([i - 1 for chain in chains for i in range(len(chain))], dtype=np.int32),
        cu_support=_starts([len(ids) for _, ids, _ in flat]),
        support_ids=_joined([ids for _, ids, _ in flat], id_type),
        support_weights=_joined([weights for _, _, weights in flat], np.float16),
    )


def _starts(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
