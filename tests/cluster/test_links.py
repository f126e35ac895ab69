"""The Ray link against scripted drafter actors: what it delivers, and what it survives."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from outrider.cluster.endpoints import DraftEndpoint
from outrider.cluster.links import InProcessDraftLink, LinkError, RayDraftLink, joined
from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.link import Batch, no_drafts


def verdict(rows: dict[int, int], base: int = 4, drafts: int = 2, width: int = 3) -> VerdictBatch:
    """Verdicts for requests (id -> number of feature rows), each asking for `drafts` tokens."""
    count, total = len(rows), sum(rows.values())
    return VerdictBatch(
        service="s",
        sender="v",
        round=1,
        target_version=0,
        head_version=1,
        request_ids=np.array(list(rows), dtype=np.int64),
        epochs=np.zeros(count, dtype=np.int32),
        base_lengths=np.full(count, base, dtype=np.int32),
        num_accepted=np.array([n - 1 for n in rows.values()], dtype=np.int32),
        num_to_draft=np.full(count, drafts, dtype=np.int32),
        cu_tokens=np.cumsum([0, *rows.values()]).astype(np.int32),
        token_ids=np.arange(total, dtype=np.int32),
        features=np.arange(total * width, dtype=np.float32).reshape(total, width),
    )


def opening(request_id: int, temperature: float = 0.0) -> RequestOpen:
    return RequestOpen(
        request_id=request_id,
        epoch=0,
        prompt_ids=np.array([1, 2], dtype=np.int32),
        output_ids=np.zeros(0, dtype=np.int32),
        seed=7,
        sample_index=0,
        parameters=SamplingParameters(temperature=temperature),
        method="rejection",
    )


def wanting(*request_ids: int) -> Batch:
    count = len(request_ids)
    ones = np.ones(count, dtype=np.int32)
    return Batch(np.array(request_ids, dtype=np.int64), 0 * ones, ones, ones, 2 * ones)


class Script:
    """A drafter that answers each asked request with the tokens 7, 8, ... and remembers calls."""

    def __init__(self, head_version: int = 1) -> None:
        self.head_version = head_version
        self.open_ids: set[int] = set()
        self.seen: list[int] = []
        self.pause_s = 0.0
        self.fault: str | None = None

    def feature_spec(self) -> FeatureSpec:
        return FeatureSpec((1,), 3, self.head_version, None, None)

    def open(self, request: RequestOpen) -> None:
        self.open_ids.add(request.request_id)

    def close(self, request: RequestClose) -> None:
        self.open_ids.discard(request.request_id)

    def propose(self, verdicts: VerdictBatch) -> DraftBatch:
        time.sleep(self.pause_s)
        if self.fault == "raise":
            raise RuntimeError("scripted")
        if self.fault == "exit":
            os._exit(1)
        self.seen.extend(verdicts.request_ids.tolist())
        rows = np.diff(verdicts.cu_tokens)
        asked = verdicts.num_to_draft > 0
        counts = verdicts.num_to_draft[asked]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.concatenate([np.arange(n, dtype=np.int32) for n in counts] or [rows[:0]])
        return dataclasses.replace(
            no_drafts("s", "d"),
            round=verdicts.round,
            head_version=self.head_version,
            request_ids=verdicts.request_ids[asked],
            epochs=verdicts.epochs[asked],
            base_lengths=(verdicts.base_lengths + rows + 1)[asked].astype(np.int32),
            last_token_ids=verdicts.token_ids[verdicts.cu_tokens[1:] - 1][asked],
            cu_num_draft_tokens=offsets,
            token_ids=(7 + places).astype(np.int32),
            parents=(places - 1).astype(np.int32),
            cu_support=np.zeros(int(offsets[-1]) + 1, dtype=np.int32),
        )


class ScriptActor:
    """The script behind a drafter actor's methods."""

    def __init__(self, head_version: int = 1) -> None:
        self.script = Script(head_version)
        self.endpoint = DraftEndpoint(self.script, max_support=4)
        self.garble = False

    def attach(self) -> bytes:
        return self.endpoint.attach()

    def round(self, opens: list[bytes], verdict: bytes | None, closes: list[bytes]) -> bytes:
        data = self.endpoint.round(opens, verdict, closes)
        return data[:-3] + b"???" if self.garble and data else data

    def set(self, name: str, value: Any) -> None:
        setattr(self if name == "garble" else self.script, name, value)

    def get(self, name: str) -> Any:
        return getattr(self.script, name)


Remote: Any = ray.remote(num_cpus=0)(ScriptActor)


@pytest.fixture
def drafter(local_ray: None) -> Iterator[Any]:
    handle = Remote.remote()
    yield handle
    ray.kill(handle)


def link_to(**drafters: Any) -> RayDraftLink:
    return RayDraftLink(drafters, attach_timeout_s=30.0, max_in_flight=4, max_in_flight_bytes=2**20)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_drafts_arrive_as_in_process(drafter: Any) -> None:
    """The same verdicts give the same drafts over Ray as in this process."""
    remote, local = link_to(d=drafter), InProcessDraftLink(Script())
    assert remote.take_feature_spec() is not None
    assert remote.take_feature_spec() is None
    for link in (remote, local):
        for request_id in (1, 2):
            link.open(opening(request_id))
    for base in (4, 6):
        batches = []
        for link in (remote, local):
            link.send(verdict({1: 2, 2: 1}, base))
            batches.append(link.collect(wanting(1, 2), soon()))
        for item in dataclasses.fields(DraftBatch):
            left, right = (getattr(batch, item.name) for batch in batches)
            assert np.array_equal(left, right), item.name
    assert remote.stats.draft_bytes > 0 and remote.stats.verdict_bytes > 0
    assert local.stats.draft_bytes == 0


def test_requests_are_forgotten_on_both_sides(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    link.open(opening(2))
    link.send(verdict({1: 1, 2: 1}))
    link.collect(wanting(1, 2), soon())
    link.close(RequestClose(1, 0))
    link.open(opening(3))
    link.close(RequestClose(3, 0))  # the drafter never hears of it
    link.close(RequestClose(2, 0))  # the last one: nobody else would carry the closes
    assert ray.get(drafter.get.remote("open_ids"), timeout=10) == set()
    assert link.requests_per_drafter == {"d": 0}


def test_the_ids_of_two_verifiers_do_not_meet(drafter: Any) -> None:
    links = [link_to(d=drafter), link_to(d=drafter)]
    for link in links:
        link.open(opening(1))
        link.send(verdict({1: 1}))
        assert link.collect(wanting(1), soon()).request_ids.tolist() == [1]
    assert len(ray.get(drafter.get.remote("open_ids"), timeout=10)) == 2


def test_a_late_drafter_is_not_waited_for_beyond_the_deadline(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    ray.get(drafter.set.remote("pause_s", 0.5), timeout=10)
    link.send(verdict({1: 1}))
    began = time.monotonic()
    assert len(link.collect(wanting(1), soon(0.05)).request_ids) == 0
    assert time.monotonic() - began < 0.3
    assert link.stats.late_rounds == 1
    # What comes late is delivered, for the engine to find stale.
    assert link.collect(wanting(1), soon()).base_lengths.tolist() == [6]


def test_a_drafter_that_owes_drafts_is_asked_for_no_more(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    ray.get(drafter.set.remote("pause_s", 0.2), timeout=10)
    for base in (4, 5, 6):
        link.send(verdict({1: 1}, base))
    began = time.monotonic()
    answers = link.collect(wanting(1), soon())
    assert answers.base_lengths.tolist() == [6, 7]  # the third verdict was catch-up only
    assert time.monotonic() - began < 2.0
    ray.get(drafter.set.remote("pause_s", 0.0), timeout=10)
    link.send(verdict({1: 1}, 7))
    assert link.collect(wanting(1), soon()).base_lengths.tolist() == [9]


def test_a_killed_drafter_costs_drafts_and_no_time(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    link.send(verdict({1: 1}))
    link.collect(wanting(1), soon())
    ray.kill(drafter)
    link.send(verdict({1: 1}, 6))
    assert len(link.collect(wanting(1), soon(10.0)).request_ids) == 0
    assert link.stats.lost_drafters == 1
    assert link.stats.abandoned_requests == 1
    began = time.monotonic()
    for base in range(7, 20):
        link.send(verdict({1: 1}, base))
        link.collect(wanting(1), soon(10.0))
    assert time.monotonic() - began < 0.5
    link.open(opening(2))  # nobody is left to draft it
    assert link.stats.abandoned_requests == 2
    link.close(RequestClose(2, 0))
    link.close_link()


def test_a_drafter_that_exits_in_a_round_is_lost(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    ray.get(drafter.set.remote("fault", "exit"), timeout=10)
    link.send(verdict({1: 1}))
    assert len(link.collect(wanting(1), soon(20.0)).request_ids) == 0
    assert link.stats.lost_drafters == 1


@pytest.mark.parametrize(("name", "value"), [("fault", "raise"), ("garble", True)])
def test_a_failed_round_costs_its_requests_their_drafts(
    drafter: Any, name: str, value: object
) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    ray.get(drafter.set.remote(name, value), timeout=10)
    link.send(verdict({1: 1}))
    assert len(link.collect(wanting(1), soon()).request_ids) == 0
    assert link.stats.abandoned_requests == 1
    assert link.stats.malformed_messages == (name == "garble")
    # The next request may try again.
    ray.get(drafter.set.remote(name, None), timeout=10)
    link.open(opening(2))
    link.send(verdict({1: 1, 2: 1}))
    assert link.collect(wanting(2), soon()).request_ids.tolist() == [2]


def test_messages_in_flight_are_bounded(drafter: Any) -> None:
    link = link_to(d=drafter)
    link.open(opening(1))
    ray.get(drafter.set.remote("pause_s", 1.0), timeout=10)
    for base in range(4, 12):
        link.send(verdict({1: 1}, base))
    assert link.stats.overflows == 1
    assert link.stats.abandoned_requests == 1
    assert len(link.collect(wanting(1), soon(0.01)).request_ids) == 0


def test_requests_are_shared_out_and_split(drafter: Any) -> None:
    other = Remote.remote()
    link = link_to(a=drafter, b=other)
    for request_id in (1, 2, 3):
        link.open(opening(request_id))
    assert sorted(link.requests_per_drafter.values()) == [1, 2]
    link.send(verdict({1: 2, 2: 1, 3: 3}))
    batch = link.collect(wanting(1, 2, 3), soon())
    by_id = dict(zip(batch.request_ids.tolist(), batch.base_lengths.tolist(), strict=True))
    assert by_id == {1: 7, 2: 6, 3: 8}
    batch.validate()
    # One leaves: it finishes what it has and gets nothing new.
    link.set_drafters({"a": drafter})
    for request_id in (4, 5):
        link.open(opening(request_id))
    before = link.requests_per_drafter
    assert before["a"] + before["b"] == 5 and before["b"] <= 2
    ray.kill(other)


def test_a_drafter_with_another_head_is_refused(drafter: Any) -> None:
    other = Remote.remote(head_version=2)
    with pytest.raises(LinkError, match="another head"):
        link_to(a=drafter, b=other)
    link = link_to(a=drafter)
    link.set_drafters({"a": drafter, "b": other})
    link.open(opening(1))
    assert set(link.requests_per_drafter) == {"a"}
    ray.kill(other)


def test_answers_to_sampled_requests_have_one_size() -> None:
    """Or the drawn tokens would decide when they arrive."""
    from outrider.protos.codec import encode

    endpoint = DraftEndpoint(Script(), max_support=4)
    endpoint.round([encode(opening(1, temperature=1.0)), encode(opening(2))], None, [])
    sizes = {
        len(endpoint.round([], encode(verdict({1: 1}, base, drafts=3)), [])) for base in (4, 5, 6)
    }
    greedy = len(endpoint.round([], encode(verdict({2: 1}, drafts=3)), []))
    assert len(sizes) == 1
    # Four entries of an int32 id and a float16 weight for each of three tokens.
    assert sizes.pop() - greedy == 3 * 4 * (4 + 2)


def test_batches_of_another_version_are_not_mixed_in() -> None:
    script = Script()
    old = script.propose(verdict({1: 1}))
    new = dataclasses.replace(script.propose(verdict({2: 1})), head_version=5)
    assert joined([new, old]).request_ids.tolist() == [2]
    assert joined([]).request_ids.tolist() == []
