"""Every rule of `validate`, each broken in one place of a message that is otherwise sound."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from outrider.protos.messages import MalformedMessage, Message
from outrider.protos.sampling import SamplingParameters
from tests.protos.examples import (
    all_messages,
    draft_batch,
    feature_spec,
    greedy_draft_batch,
    int32,
    request_open,
    verdict_batch,
)

VOCAB_SIZE = 61


@pytest.mark.parametrize("message", all_messages(), ids=lambda m: type(m).__name__)
def test_sound_messages_pass(message: Message) -> None:
    message.validate()


def weights(*values: float) -> Any:
    return np.array(values, dtype=np.float16)


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.uint16)


BROKEN_DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("service", dict(service=3)),
    ("sender", dict(sender="x" * 256)),
    ("sender", dict(sender="\ud800")),
    ("round", dict(round=-1)),
    ("target_version", dict(target_version=2**63)),
    ("head_version", dict(head_version=True)),
    ("deterministic", dict(deterministic=1)),
    ("deterministic", dict(deterministic=np.True_)),
    ("request_ids", dict(request_ids=int32([11, -5]))),
    ("request_ids", dict(request_ids=[11, -5])),
    ("epochs", dict(epochs=int32([0]))),
    ("epochs[1]", dict(epochs=int32([0, -1]))),
    ("base_lengths[0]", dict(base_lengths=int32([-1, 4]))),
    ("base_lengths", dict(base_lengths=np.array([12, 4], dtype=">i4"))),
    ("last_token_ids[1]", dict(last_token_ids=int32([4, VOCAB_SIZE]))),
    ("cu_num_draft_tokens", dict(cu_num_draft_tokens=int32([0, 2]))),
    ("cu_num_draft_tokens", dict(cu_num_draft_tokens=int32([1, 2, 3]))),
    ("cu_num_draft_tokens", dict(cu_num_draft_tokens=int32([0, 2, 4]))),
    ("cu_num_draft_tokens[1]", dict(cu_num_draft_tokens=int32([0, 4, 3]))),
    ("token_ids[1]", dict(token_ids=int32([5, -1, 60]))),
    ("token_ids[2]", dict(token_ids=int32([5, 1, VOCAB_SIZE]))),
    ("token_ids", dict(token_ids=int32([5, 9, 1, 9, 60, 9])[::2])),
    ("parents[1]", dict(parents=int32([-1, -1, -1]))),
    ("parents[2]", dict(parents=int32([-1, 0, 1]))),
    ("parents.shape", dict(parents=int32([-1, 0]))),
    ("cu_support", dict(cu_support=int32([0, 2, 5]))),
    ("cu_support", dict(cu_support=int32([0, 2, 5, 7]))),
    ("cu_support[1]", dict(cu_support=int32([0, 6, 5, 6]))),
    ("support_ids", dict(support_ids=np.array([5, 2, 9, 1, 3, 60], dtype=np.int64))),
    ("support_ids[5]", dict(support_ids=ids(5, 2, 9, 1, 3, VOCAB_SIZE))),
    ("support_ids[0]", dict(support_ids=int32([-5, 2, 9, 1, 3, 60]))),
    ("support_ids", dict(support_ids=ids(5, 5, 9, 1, 3, 60))),
    ("support_ids", dict(support_ids=ids(5, 2, 1, 9, 1, 60))),
    ("token_ids[1]", dict(token_ids=int32([5, 4, 60]))),
    ("token_ids[1]", dict(support_weights=weights(0.5, 0.25, 0.5, 0, 0.125, 1))),
    ("support_weights.shape", dict(support_weights=weights(0.5, 0.25, 0.5, 0.25, 0.125))),
    ("support_weights", dict(support_weights=np.ones(6, dtype=np.float32))),
    ("support_weights[2]", dict(support_weights=weights(0.5, 0.25, np.nan, 0.25, 0.125, 1))),
    ("support_weights[0]", dict(support_weights=weights(np.inf, 0.25, 0.5, 0.25, 0.125, 1))),
    ("support_weights[1]", dict(support_weights=weights(0.5, -0.25, 0.5, 0.25, 0.125, 1))),
    ("support_weights[1]", dict(support_weights=weights(0.5, -0.0, 0.5, 0.25, 0.125, 1))),
    ("support_weights", dict(support_weights=weights(0.5, 0.25, 0.5, 0.5, 6e-8, 1))),
    ("support_weights", dict(support_weights=weights(0.5, 0.25, 0, 0, 0, 1))),
    ("cu_support", dict(deterministic=True)),
]


@pytest.mark.parametrize(("field", "changes"), BROKEN_DRAFTS, ids=lambda v: str(v)[:50])
def test_a_draft_batch_that_is_not_sound_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage) as caught:
        draft_batch(**changes).validate(VOCAB_SIZE)
    assert caught.value.field.startswith(field)


BROKEN_VERDICTS: list[tuple[str, dict[str, Any]]] = [
    ("request_ids", dict(request_ids=np.array([11, 11], dtype=np.int64))),
    ("num_accepted[0]", dict(num_accepted=int32([2, 0]))),
    ("num_to_draft[1]", dict(num_to_draft=int32([2, -1]))),
    ("cu_tokens", dict(cu_tokens=int32([0, 2, 4]))),
    ("cu_tokens[1]", dict(cu_tokens=int32([0, 6, 5]))),
    ("token_ids[4]", dict(token_ids=int32([3, 4, 5, 6, VOCAB_SIZE]))),
    ("base_lengths[1]", dict(base_lengths=int32([9, 2**31 - 2]))),
    ("features.shape", dict(features=np.zeros((4, 4), dtype=np.uint16))),
    ("features.shape", dict(features=np.zeros((5, 3), dtype=np.uint16))),
    ("features.shape", dict(features=np.zeros((5, 4, 1), dtype=np.uint16))),
    ("features", dict(features=np.zeros((5, 4), dtype=np.float64))),
    ("features", dict(features=np.zeros((4, 5), dtype=np.uint16).T)),
]


@pytest.mark.parametrize(("field", "changes"), BROKEN_VERDICTS, ids=lambda v: str(v)[:50])
def test_a_verdict_batch_that_is_not_sound_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage) as caught:
        verdict_batch(**changes).validate(VOCAB_SIZE, feature_width=4)
    assert caught.value.field.startswith(field)


BROKEN_OTHERS: list[tuple[str, Message]] = [
    ("request_id", request_open(request_id=2**63)),
    ("seed", request_open(seed=-1)),
    ("sample_index", request_open(sample_index=2**24)),
    ("method", request_open(method="argmax")),
    ("prompt_ids", request_open(prompt_ids=int32([]))),
    ("prompt_ids[0]", request_open(prompt_ids=int32([-1]))),
    ("parameters.top_p", request_open(parameters=SamplingParameters(top_p=0))),
    ("layers", feature_spec(layers=())),
    ("layers", feature_spec(layers=(1, 2, 2))),
    ("layers", feature_spec(layers=(-1, 2, 3))),
    ("hidden_size", feature_spec(hidden_size=0)),
    ("norm.shape", feature_spec(norm=np.ones((2, 4), dtype=np.float32))),
    ("projection.shape", feature_spec(projection=np.ones((5, 4), dtype=np.uint16))),
    ("projection", feature_spec(projection=np.ones((5, 12), dtype=np.float32))),
]


@pytest.mark.parametrize(("field", "message"), BROKEN_OTHERS, ids=lambda v: str(v)[:30])
def test_other_messages_that_are_not_sound_are_refused(field: str, message: Message) -> None:
    with pytest.raises(MalformedMessage) as caught:
        message.validate()
    assert caught.value.field.startswith(field)


def test_the_width_of_features_follows_from_the_spec() -> None:
    assert feature_spec().width == 5
    assert feature_spec(projection=None).width == 12


def test_a_layer_the_target_lacks_is_refused() -> None:
    feature_spec().validate(num_layers=6, hidden_size=4)
    with pytest.raises(MalformedMessage, match="layers: 6"):
        feature_spec().validate(num_layers=5)
    with pytest.raises(MalformedMessage, match="hidden_size: 4"):
        feature_spec().validate(hidden_size=8)


def test_one_request_may_have_several_entries() -> None:
    draft_batch(request_ids=np.array([11, 11], dtype=np.int64)).validate(VOCAB_SIZE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.25, -0.0, 0.75])
def test_a4_poisoned_q_is_refused(value: float) -> None:
    """Each value stands in the slice of token 0, which sums to .75 + .25 when it is sound."""
    draft_batch(support_weights=weights(0.75, 0.25, 0.5, 0.25, 0.125, 1)).validate(VOCAB_SIZE)
    poisoned = weights(0.75, value, 0.5, 0.25, 0.125, 1)
    with pytest.raises(MalformedMessage, match="support_weights"):
        draft_batch(support_weights=poisoned).validate(VOCAB_SIZE)


def test_a9_a_missing_law_is_told_apart_from_a_deterministic_one() -> None:
    """Both have no support. Only the flag makes one of them a law."""
    missing, deterministic = greedy_draft_batch(False), greedy_draft_batch(True)
    missing.validate(VOCAB_SIZE)
    deterministic.validate(VOCAB_SIZE)
    assert deterministic.deterministic and not missing.deterministic


def test_messages_need_neither_torch_nor_grpc_nor_ray() -> None:
    code = (
        "import sys, outrider.protos.codec; "
        "print([m for m in ('torch', 'grpc', 'ray', 'google.protobuf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
