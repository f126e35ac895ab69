"""Whole services on a real Ray: what clients get, and what happens when actors die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import ray

from outrider.cluster.client import CallFailed, Client
from outrider.cluster.completion import Completion
from outrider.cluster.config import ConfigError, StartError
from outrider.cluster.launch import Service, start_service
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.status import READY
from tests.cluster.support import POSITIONS, save_tiny_head, tiny_config
from tests.models import greedy

PROMPTS = [[5, 9, 17, 3, 44], [7], [1, 2, 3] * 9, [30, 31], [50, 4, 50, 4], [11] * 13, [20], [8, 9]]


@contextmanager
def running(models: Path, **overrides: object) -> Iterator[tuple[Service, Client]]:
    """A service of the tiny parts and a client of it."""
    service = start_service(tiny_config(models, **overrides))
    try:
        with Client(service.address, timeout_s=60.0) as client:
            yield service, client
    finally:
        service.stop(1.0)


@pytest.fixture(scope="module")
def remote(models: Path, local_ray: None) -> Iterator[Client]:
    with running(models, service="remote") as (_, client):
        yield client


@pytest.fixture(scope="module")
def colocated(models: Path, local_ray: None) -> Iterator[Client]:
    overrides = {"draft.placement": "colocated", "target.prefill_chunk": 7}
    with running(models, service="colocated", **overrides) as (_, client):
        yield client


def ask(client: Client, prompt: list[int], drafts: int | None, count: int = 24) -> Completion:
    return client.generate(
        prompt, temperature=0, max_tokens=count, ignore_eos=True, num_speculative_tokens=drafts
    )


@pytest.mark.parametrize("placement", ["remote", "colocated"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 5])
def test_greedy_answers_are_the_targets_own(
    request: pytest.FixtureRequest, models: Path, placement: str, drafts: int
) -> None:
    """Eight requests of different lengths at once, token for token."""
    client: Client = request.getfixturevalue(placement)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: ask(client, prompt, drafts), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == greedy(tuple(prompt), 24)
        statistics = answer.draft_statistics
        drafted = sum(statistics.drafted_per_position)
        assert (drafted > 0) == (drafts > 0)
        assert len(statistics.drafted_per_position) == drafts
    if drafts:
        kinds = {origin.kind for answer in answers for origin in answer.origins}
        assert "recovered" in kinds


def test_the_status_says_what_runs_where(remote: Client, models: Path) -> None:
    ask(remote, PROMPTS[0], None)
    status = remote.status()
    assert status.ready and status.service == "remote"
    (drafter,), (verifier,) = status.replicas("drafter"), status.replicas("verifier")
    assert drafter.name.startswith("outrider/remote/drafter/")
    assert (drafter.state, verifier.state) == (READY, READY)
    assert drafter.device == verifier.device == "cpu"
    assert drafter.pid != verifier.pid
    assert verifier.threads == drafter.threads == 1
    assert verifier.kv_blocks_total > 0 and verifier.kv_blocks_used == 0
    assert status.max_context == POSITIONS
    assert status.totals.draft_bytes > 0 and status.totals.verdict_bytes > 0
    assert status.totals.decode_tokens > 0 and status.totals.decode_seconds > 0


def test_plain_requests_never_reach_a_drafter(remote: Client) -> None:
    before = remote.status().totals
    ask(remote, PROMPTS[0], 0)
    work = remote.status().totals.minus(before)
    assert work.tokens == 24
    assert work.draft_bytes == work.verdict_bytes == work.late_rounds == 0


def test_a_service_without_drafters(models: Path, local_ray: None) -> None:
    with running(models, service="plain", **{"draft.placement": "none"}) as (_, client):
        assert ask(client, PROMPTS[0], 5).token_ids == greedy(tuple(PROMPTS[0]), 24)
        assert client.status().replicas("drafter") == ()
        with pytest.raises(CallFailed, match="draft placement is none"):
            client.scale(drafters=2)


def test_a_killed_drafter_costs_no_answer_and_is_replaced(models: Path, local_ray: None) -> None:
    with running(models, service="mourning") as (_, client):
        (drafter,) = client.status().replicas("drafter")
        stream = client.stream(PROMPTS[0], temperature=0, max_tokens=400, ignore_eos=True)
        tokens = list(next(stream).token_ids)
        ray.kill(ray.get_actor(drafter.name, namespace=NAMESPACE))
        last = None
        for chunk in stream:
            tokens += chunk.token_ids
            last = chunk
        assert tuple(tokens) == greedy(tuple(PROMPTS[0]), 400)
        assert last is not None and last.draft_statistics is not None
        link = client.status().totals.link
        assert (link.lost_drafters, link.abandoned_requests) == (1, 1)
        deadline = time.monotonic() + 60
        while True:
            replicas = client.status().replicas("drafter")
            if [one.state for one in replicas] == [READY] and replicas[0].name != drafter.name:
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        again = ask(client, PROMPTS[0], None)
        assert sum(again.draft_statistics.drafted_per_position) > 0


def test_a_killed_verifier_is_unavailable_and_replaced(models: Path, local_ray: None) -> None:
    overrides = {"draft.placement": "colocated"}
    with running(models, service="phoenix", **overrides) as (_, client):
        (verifier,) = client.status().replicas("verifier")
        stream = client.stream(PROMPTS[0], max_tokens=1500, ignore_eos=True)
        next(stream)
        ray.kill(ray.get_actor(verifier.name, namespace=NAMESPACE))
        with pytest.raises(CallFailed) as failure:
            list(stream)
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        deadline = time.monotonic() + 60
        while True:
            try:
                assert len(ask(client, PROMPTS[1], None).token_ids) == 24
                break
            except CallFailed as error:
                assert error.code is grpc.StatusCode.UNAVAILABLE
                assert time.monotonic() < deadline


def test_scaling_both_ways_under_load_loses_nothing(models: Path, local_ray: None) -> None:
    with running(models, service="elastic") as (_, client), ThreadPoolExecutor(4) as threads:
        answers = [
            threads.submit(ask, client, PROMPTS[index % 8], None, 120) for index in range(12)
        ]
        assert client.scale(drafters=2, verifiers=2) == (2, 2)
        status = client.status()
        assert len(status.replicas("drafter")) == len(status.replicas("verifier")) == 2
        answers += [threads.submit(ask, client, PROMPTS[i % 8], None, 120) for i in range(12)]
        assert client.scale(drafters=1, verifiers=1) == (1, 1)
        for index, answer in enumerate(answers):
            expected = greedy(tuple(PROMPTS[index % 12 % 8]), 120)
            assert answer.result(timeout=60).token_ids == expected
        with pytest.raises(CallFailed, match="drafters: 0") as refusal:
            client.scale(drafters=0)
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_one_name_is_one_service_and_is_free_at_once_afterwards(
    models: Path, local_ray: None
) -> None:
    overrides = {"draft.placement": "none"}
    with running(models, service="single", **overrides) as (_, client):
        with pytest.raises(ConfigError, match="'single' is not usable; it runs already"):
            start_service(tiny_config(models, service="single", **overrides))
        with running(models, service="other", **overrides) as (_, neighbour):
            same = [ask(one, PROMPTS[0], None).token_ids for one in (client, neighbour)]
            assert same[0] == same[1]
    with running(models, service="single", **overrides) as (_, client):
        assert len(ask(client, PROMPTS[0], None).token_ids) == 24


def test_what_is_missing_is_named_within_the_time_limit(models: Path, local_ray: None) -> None:
    overrides = {
        "counts.drafters": 2,
        "resources.drafter_cpus": 4,
        "control.start_timeout_s": 8.0,
    }
    began = time.monotonic()
    with pytest.raises(StartError) as failure:
        start_service(tiny_config(models, service="greedy", **overrides))
    assert time.monotonic() - began < 60
    message = str(failure.value)
    assert "drafter(s) found no place: each needs 4 CPU" in message
    assert "have 4 CPU in all" in message
    # Nothing is left behind: the CPUs are free again.
    with running(models, service="greedy", **{"draft.placement": "colocated"}):
        pass


def test_a_scale_that_finds_no_place_does_not_hold_up_the_end(
    models: Path, local_ray: None
) -> None:
    overrides = {"draft.placement": "none", "resources.verifier_cpus": 2.5}
    with running(models, service="crowded", **overrides) as (service, client):
        with ThreadPoolExecutor(1) as threads:
            scaling = threads.submit(client.scale, verifiers=2)
            time.sleep(2.0)
            assert len(ask(client, PROMPTS[0], None).token_ids) == 24
            began = time.monotonic()
            service.stop(1.0)
            assert time.monotonic() - began < 15
            with pytest.raises(CallFailed) as failure:
                scaling.result(timeout=30)
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE


def test_labelled_nodes_that_are_missing_are_named(models: Path, local_ray: None) -> None:
    overrides = {"resources.labels": "always", "control.start_timeout_s": 3.0}
    with pytest.raises(StartError, match="no node with the label outrider-role=drafter"):
        start_service(tiny_config(models, service="labels", **overrides))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 16, "target_hidden_size": 16, "head_dim": 4}, ["head", "16", "32"]),
        ({"vocab_size": 80}, ["head", "80", "64"]),
    ],
)
def test_a_head_that_does_not_fit_is_refused_at_the_start(
    models: Path, local_ray: None, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    save_tiny_head(tmp_path, **changes)
    for placement in ("remote", "colocated"):
        overrides = {"draft.head": str(tmp_path), "draft.placement": placement}
        with pytest.raises(StartError) as failure:
            start_service(tiny_config(models, service="misfit", **overrides))
        message = str(failure.value)
        assert "\n" not in message
        for word in words:
            assert word in message


@pytest.mark.parametrize("name", ["target.path", "draft.head"])
def test_an_absent_path_is_refused_at_the_start(models: Path, local_ray: None, name: str) -> None:
    overrides = {name: "/nowhere/at-all", "draft.placement": "colocated", "service": "absent"}
    with pytest.raises(StartError, match="/nowhere/at-all") as failure:
        start_service(tiny_config(models, **overrides))
    assert "\n" not in str(failure.value)
