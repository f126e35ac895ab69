from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protos.codec import decode, encode, largest_draft_batch
from outrider.protos.messages import DraftBatch, MalformedMessage, Message
from tests.protos.examples import all_messages, draft_batch, greedy_draft_batch, int32

ENCODED = [encode(message) for message in all_messages()]


def assert_equal(left: Message, right: Message) -> None:
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b and type(a) is type(b)


@pytest.mark.parametrize("message", all_messages(), ids=lambda m: type(m).__name__)
def test_what_arrives_is_what_was_sent(message: Message) -> None:
    assert_equal(decode(encode(message)), message)
    assert_equal(decode(memoryview(encode(message, pad_to=5000))), message)


@pytest.mark.parametrize("data", ENCODED)
def test_every_truncation_is_malformed(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode(data[:size])


def decodes_or_is_malformed(data: bytes) -> None:
    try:
        message = decode(data)
    except MalformedMessage:
        return
    message.validate()


@settings(max_examples=1500, deadline=None)
@given(
    which=st.integers(0, len(ENCODED) - 1),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    cut=st.tuples(st.integers(0, 2**16), st.integers(0, 12)),
    insert=st.binary(max_size=12),
)
def test_mutated_bytes_are_a_sound_message_or_malformed(
    which: int, changes: list[tuple[int, int]], cut: tuple[int, int], insert: bytes
) -> None:
    data = bytearray(ENCODED[which])
    for place, value in changes:
        data[place % len(data)] = value
    start = cut[0] % len(data)
    data[start : start + cut[1]] = insert
    decodes_or_is_malformed(bytes(data))


@settings(max_examples=1500, deadline=None)
@given(
    which=st.integers(0, len(ENCODED) - 1),
    place=st.integers(0, 2**16),
    word=st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 7, 0x7E00]),
    form=st.sampled_from(["<H", "<I", "<Q"]),
)
def test_extreme_words_are_a_sound_message_or_malformed(
    which: int, place: int, word: int, form: str
) -> None:
    data = bytearray(ENCODED[which])
    size = struct.calcsize(form)
    start = place % (len(data) - size + 1)
    struct.pack_into(form, data, start, word & (2 ** (8 * size) - 1))
    decodes_or_is_malformed(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)
    with pytest.raises(MalformedMessage):
        decode(ENCODED[0][:16] + data)


def test_the_fuzz_tests_catch_a_decoder_that_trusts_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: without bounds checks other errors get out; without validation, bad messages."""

    def unguarded(self: Any, size: int, field: str) -> int:
        self.offset += size
        return int(self.offset - size)

    cut = ENCODED[0][:-8]
    with monkeypatch.context() as patch:
        patch.setattr("outrider.protos.codec._Reader.take", unguarded)
        with pytest.raises((struct.error, ValueError)) as caught:
            decodes_or_is_malformed(cut[:8] + struct.pack("<Q", len(cut)) + cut[16:])
        assert not isinstance(caught.value, MalformedMessage)
    sound = DraftBatch.validate
    negative = encode(draft_batch()).replace(struct.pack("<i", 60), struct.pack("<i", -60))
    with monkeypatch.context() as patch:
        patch.setattr(DraftBatch, "validate", lambda self: None)
        message = decode(negative)
    assert isinstance(message, DraftBatch)
    with pytest.raises(MalformedMessage):
        sound(message)


def test_an_unsound_message_is_not_sent() -> None:
    with pytest.raises(MalformedMessage, match=r"token_ids\[1\]"):
        encode(draft_batch(token_ids=int32([5, -1, 60])))


def test_other_versions_are_refused_by_number() -> None:
    data = bytearray(ENCODED[0])
    data[4] = 2
    with pytest.raises(MalformedMessage, match="version: 2"):
        decode(bytes(data))


def test_a4_the_receiver_owns_its_copy() -> None:
    """The drafter may reuse its buffers, and even the receive buffer may be reused."""
    weights = draft_batch().support_weights.copy()
    data = bytearray(encode(draft_batch(support_weights=weights)))
    weights[:] = 0
    message = decode(data)
    data[:] = bytes(len(data))
    assert isinstance(message, DraftBatch)
    np.testing.assert_array_equal(message.support_weights, draft_batch().support_weights)
    with pytest.raises(ValueError, match="read-only"):
        message.support_weights[0] = 1


def full_batch(requests: int, drafts: int, support: int, id_type: Any = np.uint16) -> DraftBatch:
    tokens = requests * drafts
    one = np.arange(support).astype(id_type)
    weight = np.full(support, 2.0**-8, dtype=np.float16)
    return draft_batch(
        request_ids=np.arange(requests, dtype=np.int64),
        epochs=int32([0] * requests),
        base_lengths=int32([100] * requests),
        last_token_ids=int32([1] * requests),
        cu_num_draft_tokens=int32(range(0, tokens + 1, drafts)),
        token_ids=int32([0] * tokens),
        parents=int32(list(range(-1, drafts - 1)) * requests),
        cu_support=int32(range(0, tokens * support + 1, support)),
        support_ids=np.tile(one, tokens),
        support_weights=np.tile(weight, tokens),
    )


@pytest.mark.parametrize(("requests", "drafts"), [(2, 3), (4, 5), (64, 2)])
def test_a_draft_token_of_240_entries_stays_under_a_kibibyte(requests: int, drafts: int) -> None:
    assert len(encode(full_batch(requests, drafts, 240))) < 1024 * requests * drafts


def test_padding_hides_what_was_drafted() -> None:
    """A chain that ended early is as long as a full one on the wire, whatever it holds."""
    size = largest_draft_batch("default", "drafter/1", 2, 6, 240, 2)
    batches = [full_batch(2, 3, 240), draft_batch(), greedy_draft_batch(False), full_batch(1, 1, 1)]
    assert {len(encode(batch, pad_to=size)) for batch in batches} == {size}
    assert len({len(encode(batch)) for batch in batches}) > 1  # control: without it they differ
    with pytest.raises(ValueError, match="pad_to: 100 is not usable"):
        encode(draft_batch(), pad_to=100)


@pytest.mark.parametrize("id_type", [np.uint16, np.int32])
def test_the_largest_batch_fits_what_is_planned_for_it(id_type: Any) -> None:
    for requests, drafts, support in [(1, 1, 1), (3, 5, 17), (2, 3, 240)]:
        batch = full_batch(requests, drafts, support, id_type)
        planned = largest_draft_batch(
            "default", "drafter/1", requests, requests * drafts, support, np.dtype(id_type).itemsize
        )
        assert 0 <= planned - len(encode(batch)) < 100


def test_padding_that_is_not_zero_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="padding"):
        decode(encode(draft_batch(), pad_to=5000)[:-1] + b"x")
