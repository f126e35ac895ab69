"""Sound messages to start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    Message,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)
from outrider.protos.sampling import SamplingParameters


def int32(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int32)


def request_open(**changes: Any) -> RequestOpen:
    fields: dict[str, Any] = dict(
        request_id=-7,
        epoch=2,
        prompt_ids=int32([1, 2, 3]),
        output_ids=int32([]),
        seed=2**64 - 1,
        sample_index=3,
        parameters=SamplingParameters(
            temperature=0.7,
            top_k=5,
            logit_bias=((4, -1.5), (2, 3.0)),
            allowed_token_ids=(1, 2, 4),
        ),
        method="rejection",
    )
    return RequestOpen(**(fields | changes))


def feature_spec(**changes: Any) -> FeatureSpec:
    fields: dict[str, Any] = dict(
        layers=(2, 4, 6),
        hidden_size=4,
        head_version=9,
        norm=np.ones((3, 4), dtype=np.float32),
        projection=np.arange(5 * 12, dtype=np.uint16).reshape(5, 12),
    )
    return FeatureSpec(**(fields | changes))


def verdict_batch(**changes: Any) -> VerdictBatch:
    fields: dict[str, Any] = dict(
        service="default",
        sender="verifier/0",
        round=12,
        target_version=1,
        head_version=2,
        request_ids=np.array([11, -5], dtype=np.int64),
        epochs=int32([0, 1]),
        base_lengths=int32([9, 0]),
        num_accepted=int32([1, 0]),
        num_to_draft=int32([2, 0]),
        cu_tokens=int32([0, 2, 5]),
        token_ids=int32([3, 4, 5, 6, 7]),
        features=np.arange(5 * 4, dtype=np.uint16).reshape(5, 4),
    )
    return VerdictBatch(**(fields | changes))


def draft_batch(**changes: Any) -> DraftBatch:
    """Two chains, of two tokens and of one; supports of 2, 3 and 1 entries."""
    fields: dict[str, Any] = dict(
        service="default",
        sender="drafter/1",
        round=12,
        target_version=1,
        head_version=2,
        deterministic=False,
        request_ids=np.array([11, -5], dtype=np.int64),
        epochs=int32([0, 1]),
        base_lengths=int32([12, 4]),
        last_token_ids=int32([4, 7]),
        cu_num_draft_tokens=int32([0, 2, 3]),
        token_ids=int32([5, 1, 60]),
        parents=int32([-1, 0, -1]),
        cu_support=int32([0, 2, 5, 6]),
        support_ids=np.array([5, 2, 9, 1, 3, 60], dtype=np.uint16),
        support_weights=np.array([0.5, 0.25, 0.5, 0.25, 0.125, 1.0], dtype=np.float16),
    )
    return DraftBatch(**(fields | changes))


def greedy_draft_batch(deterministic: bool) -> DraftBatch:
    return draft_batch(
        deterministic=deterministic,
        cu_support=int32([0, 0, 0, 0]),
        support_ids=np.zeros(0, dtype=np.int32),
        support_weights=np.zeros(0, dtype=np.float16),
    )


def all_messages() -> list[Message]:
    return [
        request_open(),
        request_open(parameters=SamplingParameters(), seed=0, output_ids=int32([8, 9])),
        RequestClose(request_id=-7, epoch=2),
        feature_spec(),
        feature_spec(norm=None, projection=None),
        verdict_batch(),
        verdict_batch(features=np.full((5, 2), 0.5, dtype=np.float32)),
        draft_batch(),
        greedy_draft_batch(True),
        greedy_draft_batch(False),
        draft_batch(
            request_ids=np.zeros(0, dtype=np.int64),
            epochs=int32([]),
            base_lengths=int32([]),
            last_token_ids=int32([]),
            cu_num_draft_tokens=int32([0]),
            token_ids=int32([]),
            parents=int32([]),
            cu_support=int32([0]),
            support_ids=np.zeros(0, dtype=np.uint16),
            support_weights=np.zeros(0, dtype=np.float16),
        ),
    ]
