"""The gRPC door in front of a real engine, over real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.cluster.client import AsyncClient, CallFailed
from outrider.cluster.completion import Chunk
from outrider.cluster.errors import Overloaded
from outrider.cluster.streams import Stream
from outrider.cluster.verifiers import VerifierLost
from outrider.protos import outrider_pb2 as pb
from outrider.protos import outrider_pb2_grpc as pb_grpc
from outrider.verifier.types import TokenOutput
from tests.cluster.support import POSITIONS, Door
from tests.models import WORDS, greedy

PROMPT = [5, 9, 17, 3, 44]


@pytest.fixture
async def client(door: Door) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(door.address, timeout_s=60.0) as made:
        yield made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_the_answer_is_the_targets_own(client: AsyncClient) -> None:
    answer = await client.generate(PROMPT, temperature=0, max_tokens=40, ignore_eos=True)
    expected = list(greedy(tuple(PROMPT), 40))
    assert list(answer.token_ids) == expected
    assert answer.text.split() == [f"w{token}" for token in expected if token != 0]
    assert answer.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)
    assert {origin.kind for origin in answer.origins} == {"plain"}
    assert answer.draft_statistics.rounds == answer.draft_statistics.undrafted_rounds == 40


async def test_text_chat_and_ids_are_the_same_prompt(client: AsyncClient) -> None:
    ids = await client.generate([5, 9, 1], temperature=0, max_tokens=8, ignore_eos=True)
    text = await client.generate("w5 w9 w1", temperature=0, max_tokens=8, ignore_eos=True)
    talk = await client.chat(chat("w5 w9"), temperature=0, max_tokens=8, ignore_eos=True)
    assert ids.token_ids == text.token_ids == talk.token_ids


async def test_the_seed_that_was_drawn_repeats_the_answer(client: AsyncClient) -> None:
    first = await client.generate(PROMPT, max_tokens=20, ignore_eos=True)
    again = await client.generate(PROMPT, max_tokens=20, ignore_eos=True, seed=first.seed)
    other = await client.generate(
        PROMPT, max_tokens=20, ignore_eos=True, seed=first.seed, sample_index=1
    )
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids


async def test_token_texts_come_on_demand(client: AsyncClient) -> None:
    chunks = [
        chunk
        async for chunk in client.stream(
            PROMPT, temperature=0, max_tokens=5, ignore_eos=True, want_token_texts=True
        )
    ]
    assert all(len(chunk.token_texts) == len(chunk.token_ids) for chunk in chunks)
    pieces = "".join(piece for chunk in chunks for piece in chunk.token_texts)
    assert pieces == "".join(chunk.text for chunk in chunks) != ""


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ("", {}, ["prompt", "empty", "give text"]),
        ([], {}, ["prompt", "empty"]),
        ([1] * POSITIONS, {}, ["prompt", f"{POSITIONS} tokens", f"at most {POSITIONS - 1}"]),
        ([WORDS], {}, ["tokens", "61", "0 to 60"]),
        ([-1], {}, ["tokens", "-1"]),
        (PROMPT, {"max_tokens": 0}, ["max_tokens", "0", "at least 1"]),
        (PROMPT, {"max_tokens": -3}, ["max_tokens", "-3", "at least 1"]),
        (PROMPT, {"temperature": math.nan}, ["temperature", "nan"]),
        (PROMPT, {"temperature": -1.0}, ["temperature", "-1"]),
        (PROMPT, {"top_p": 0.0}, ["top_p", "0"]),
        (PROMPT, {"top_k": -1}, ["top_k", "-1"]),
        (PROMPT, {"min_p": 1.5}, ["min_p", "1.5"]),
        (PROMPT, {"repetition_penalty": 0.0}, ["repetition_penalty", "0"]),
        (PROMPT, {"logit_bias": {WORDS: 1.0}}, ["logit_bias", "61"]),
        (PROMPT, {"allowed_token_ids": []}, ["allowed_token_ids"]),
        (PROMPT, {"num_speculative_tokens": -1}, ["num_speculative_tokens", "-1"]),
        (PROMPT, {"sample_index": 2**24}, ["sample_index", str(2**24)]),
        (PROMPT, {"seed": 2**63}, ["seed"]),
        (PROMPT, {"stop": [""]}, ["stop"]),
        (PROMPT, {"stop": ["x"] * 17}, ["stop", "17", "16"]),
        ([{"role": "robot", "content": "w1"}], {}, ["chat.role", "robot", "system"]),
    ],
)
async def test_bad_input_is_refused_and_the_others_go_on(
    client: AsyncClient, prompt: Any, fields: dict[str, Any], words: list[str]
) -> None:
    other = asyncio.create_task(client.generate(PROMPT, max_tokens=60, ignore_eos=True))
    await asyncio.sleep(0.02)
    with pytest.raises(CallFailed) as refusal:
        await client.generate(prompt, **fields)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in refusal.value.details
    for word in words:
        assert word in refusal.value.details
    assert (await other).usage.completion_tokens == 60


async def test_a_resume_is_refused_by_name(door: Door) -> None:
    async with grpc.aio.insecure_channel(door.address) as channel:
        call = pb_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), resume_from=3)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "resume_from" in str(refusal.value.details())


async def read_some(client: AsyncClient, count: int, **fields: Any) -> list[Chunk]:
    """Reads `count` chunks of an answer and leaves."""
    chunks: list[Chunk] = []
    stream = client.stream(PROMPT, max_tokens=1500, ignore_eos=True, **fields)
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == count:
            break
    await stream.aclose()
    return chunks


async def test_a_cancelled_request_stops_within_two_rounds(client: AsyncClient, door: Door) -> None:
    door.link.pause_s = 0.1
    await read_some(client, 3)
    left = door.rounds
    await door.idle()
    assert door.rounds - left <= 2


async def test_a_deadline_ends_the_work(client: AsyncClient, door: Door) -> None:
    door.link.pause_s = 0.05
    with pytest.raises(CallFailed) as failure:
        await client.generate(PROMPT, max_tokens=1500, ignore_eos=True, timeout_s=0.3)
    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    left = door.rounds
    await door.idle()
    assert door.rounds - left <= 2


async def test_a_request_id_in_flight_is_taken_and_free_afterwards(
    client: AsyncClient, door: Door
) -> None:
    door.link.pause_s = 0.02
    stream = client.stream(PROMPT, request_id="mine", max_tokens=1500, ignore_eos=True)
    await anext(stream)
    with pytest.raises(CallFailed, match="'mine' is in flight") as refusal:
        await client.generate(PROMPT, request_id="mine", max_tokens=1)
    assert refusal.value.code is grpc.StatusCode.ALREADY_EXISTS
    await stream.aclose()
    await door.idle()
    answer = await client.generate(PROMPT, request_id="mine", max_tokens=2, ignore_eos=True)
    assert answer.request_id == "mine"


@pytest.mark.parametrize("door", [{"admission_limit": 2}], indirect=True)
async def test_more_than_admitted_is_told_to_come_back(client: AsyncClient, door: Door) -> None:
    door.link.pause_s = 0.02
    streams = [client.stream(PROMPT, max_tokens=1500, ignore_eos=True) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(CallFailed) as refusal:
        await client.generate(PROMPT, max_tokens=1)
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.value.retry_after_s == 1.0
    for stream in streams:
        await stream.aclose()
    await door.idle()
    await client.generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize("door", [{"max_message_bytes": 8 * 2**20}], indirect=True)
async def test_a_large_prompt_is_taken_whole_and_a_too_large_one_refused(door: Door) -> None:
    """Both sides' limits are above gRPC's own 4 MB; beyond them the refusal is clean."""
    large = "w5 " * (5 * 2**20 // 3)
    async with AsyncClient(door.address, max_message_bytes=32 * 2**20) as client:
        with pytest.raises(CallFailed) as refusal:
            await client.generate(large)
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT  # read, then too long
        with pytest.raises(CallFailed) as refusal:
            await client.generate(large * 2)
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await client.generate(PROMPT, max_tokens=2)


async def test_a_lost_verifier_is_unavailable_after_the_first_token(
    client: AsyncClient, door: Door
) -> None:
    door.link.pause_s = 0.02
    stream = client.stream(PROMPT, max_tokens=1500, ignore_eos=True)
    await anext(stream)
    door.verifier.lost = True
    with pytest.raises(CallFailed) as failure:
        async for _ in stream:
            pass
    assert failure.value.code is grpc.StatusCode.UNAVAILABLE
    assert "was lost" in failure.value.details
    assert door.gateway.in_flight == 0


async def test_unavailable_before_the_first_token_is_tried_again(
    client: AsyncClient, door: Door
) -> None:
    door.verifier.lost = True
    door.gateway._lose("v", VerifierLost("gone"))
    waiting = asyncio.create_task(client.generate(PROMPT, max_tokens=3, ignore_eos=True))
    await asyncio.sleep(0.2)
    door.verifier.lost = False
    door.gateway.add_verifier("again", door.verifier)
    assert (await waiting).usage.completion_tokens == 3


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
async def test_stopping_under_load_loses_and_doubles_nothing(
    client: AsyncClient, door: Door, grace_s: float
) -> None:
    """Every request is answered whole, once, or fails with UNAVAILABLE."""
    door.link.pause_s = 0.01
    tasks = [
        asyncio.create_task(client.generate(PROMPT, max_tokens=10, ignore_eos=True, seed=index))
        for index in range(12)
    ]
    await asyncio.sleep(0.1)
    await door.server.stop(grace_s)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    whole = [one for one in outcomes if not isinstance(one, BaseException)]
    assert all(one.usage.completion_tokens == len(one.token_ids) == 10 for one in whole)
    for failure in outcomes:
        if isinstance(failure, BaseException):
            assert isinstance(failure, CallFailed)
            assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert grace_s == 0.0 or len(whole) == 12
    assert door.running == 0


async def test_a_stream_that_is_not_read_is_bounded() -> None:
    """The engine never waits for a reader: past the buffer the request ends instead."""
    stream = Stream("r", "v", buffer=3)
    for _ in range(4):
        stream.push(TokenOutput("r", (1,), (0,), "w1", None, None, 0, 0, 1, 1))
    with pytest.raises(Overloaded, match="3 tokens unread"):
        await anext(stream.outputs())
    assert not stream.finished  # so that the gateway cancels its work


async def ping_through(address: str) -> grpc.StatusCode:
    """The status of a request during which the client pings each second."""
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = pb_grpc.GenerationStub(channel).Generate(
            pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), max_tokens=1)
        )
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_a_client_that_pings_through_a_silent_round_is_kept(door: Door) -> None:
    door.link.pause_s = 7.0
    assert await ping_through(door.address) is grpc.StatusCode.OK


async def test_a_server_with_default_options_sends_that_client_away() -> None:
    """The control: gRPC's defaults allow a ping in five minutes."""

    class Silent(pb_grpc.GenerationServicer):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(7.0)
            yield pb.GenerateResponse()

    server = grpc.aio.server()
    pb_grpc.add_GenerationServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await ping_through(f"127.0.0.1:{port}") is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_health_follows_the_service_and_reflection_names_it(door: Door) -> None:
    async with grpc.aio.insecure_channel(door.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        state = await health.Check(health_pb2.HealthCheckRequest())
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        await door.server.set_serving(False)
        state = await health.Check(health_pb2.HealthCheckRequest(service="outrider.v1.Generation"))
        assert state.status == health_pb2.HealthCheckResponse.NOT_SERVING

        async def ask() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"outrider.v1.Generation", "outrider.v1.Cluster", "grpc.health.v1.Health"} <= names
