"""The gRPC door: admits requests, hands them to verifiers, writes their streams.

It holds no tokens beyond what a client has not read yet. Per verifier one `next_outputs` call is
outstanding; it brings the new tokens of all requests of a round at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.cluster.config import GatewayConfig
from outrider.cluster.errors import (
    DuplicateRequest,
    ErrorInterceptor,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from outrider.cluster.requests import Limits, PromptEncoder, build, check, prompt_ids, request_id_of
from outrider.cluster.status import ServiceStatus, to_message
from outrider.cluster.streams import DraftCounter, Stream, response
from outrider.cluster.verifiers import Verifier, VerifierLost
from outrider.protos import outrider_pb2 as pb
from outrider.protos import outrider_pb2_grpc as pb_grpc
from outrider.protos.sampling import InvalidField
from outrider.verifier.types import GenerationRequest, Refusal

logger = logging.getLogger(__name__)

POLL_S = 1.0
CLOSE_S = 5.0
SERVICES = ("outrider.v1.Generation", "outrider.v1.Cluster")


class ControlPlane(Protocol):
    """What the gateway passes on to whoever places the actors."""

    async def status(self) -> ServiceStatus:
        """The state of the actors; the gateway adds its own numbers."""
        ...

    async def scale(self, drafters: int | None, verifiers: int | None) -> tuple[int, int]:
        """Changes the counts; returns those reached."""
        ...


class Gateway:
    """Requests in flight and the verifiers that serve them."""

    def __init__(
        self, config: GatewayConfig, limits: Limits, encoder: PromptEncoder | None
    ) -> None:
        self.name = secrets.token_hex(4)
        self.config = config
        self.limits = limits
        self._encoder = encoder
        # One thread: a tokenizer is not safe to share, and encoding is short.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._verifiers: dict[str, Verifier] = {}
        self._draining: set[str] = set()
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._ids: set[str] = set()  # client ids in flight, until the engine forgot them
        self._streams: dict[str, Stream] = {}  # by engine id
        self._serials = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def in_flight(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._ids)

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Those that take requests."""
        return tuple(name for name in self._verifiers if name not in self._draining)

    def add_verifier(self, name: str, verifier: Verifier) -> None:
        """From now on requests may go to this verifier."""
        self._verifiers[name] = verifier
        self._polls[name] = asyncio.create_task(self._poll(name, verifier))

    async def drain_verifier(self, name: str) -> None:
        """Gives it no more requests and returns when those it has are finished."""
        self._draining.add(name)
        while name in self._verifiers and self._load(name):
            await asyncio.sleep(0.02)
        if name in self._verifiers:
            self._polls[name].cancel()
            self._forget(name)

    async def generate(
        self, message: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One request from admission to its last token; leaving early cancels its work."""
        request_id = request_id_of(message)
        self._admit(request_id)
        stream = None
        try:
            parameters = check(message, self.limits)
            ids = await asyncio.get_running_loop().run_in_executor(
                self._threads, prompt_ids, message, self._encoder, self.limits
            )
            engine_id = f"{request_id}@{self.name}.{next(self._serials)}"
            request = build(message, engine_id, parameters, ids, self.limits)
            stream = await self._submit(request)
            pieces = None
            if message.want_token_texts and self._encoder is not None:
                pieces = self._encoder.detokenizer(ids)
            async with aclosing(self._answers(request_id, request, stream)) as answers:
                async for answer in answers:
                    if pieces is not None:
                        answer.token_texts.extend(map(pieces.push, answer.token_ids))
                    yield answer
        finally:
            if stream is None or stream.finished:
                self._release(request_id, stream)
            else:
                self._spawn(self._cancel(request_id, stream))

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, lets the others finish, and ends what is left after the grace."""
        self._stopping = True
        await self._emptied(grace_s)
        for stream in self._streams.values():
            stream.fail(Unavailable("the gateway stopped before the answer was complete"))
        await self._emptied(CLOSE_S)
        for poll in self._polls.values():
            poll.cancel()
        self._threads.shutdown(wait=False)

    async def _emptied(self, limit_s: float) -> None:
        clock = asyncio.get_running_loop().time
        give_up = clock() + limit_s
        while (self._ids or self._tasks) and clock() < give_up:
            await asyncio.sleep(0.02)

    def _admit(self, request_id: str) -> None:
        if self._stopping:
            raise Unavailable("the gateway is stopping", 1.0)
        if request_id in self._ids:
            raise DuplicateRequest(
                f"request_id: {request_id!r} is in flight; choose another or wait for its end"
            )
        limit = self.config.admission_limit
        if len(self._ids) >= limit:
            raise Overloaded(f"{limit} requests are in flight, the admission limit", 1.0)
        self._ids.add(request_id)

    async def _submit(self, request: GenerationRequest) -> Stream:
        candidates = self.verifiers
        if not candidates:
            raise Unavailable("no verifier is ready", 1.0)
        name = min(candidates, key=self._load)
        stream = Stream(request.request_id, name, self.config.stream_buffer)
        self._streams[request.request_id] = stream
        submission = asyncio.create_task(self._verifiers[name].submit(self.name, [request]))
        try:
            (refusal,) = await asyncio.shield(submission)
        except asyncio.CancelledError:
            self._spawn(self._cancel_submitted(submission, stream))
            raise
        except VerifierLost as error:
            self._streams.pop(request.request_id, None)
            self._lose(name, error)
            raise Unavailable(f"verifier {name} was lost: {error}", 1.0) from error
        if refusal is not None:
            del self._streams[request.request_id]
            if refusal.retry:
                raise Overloaded(refusal.message, 1.0)
            raise InvalidRequest(refusal.message)
        return stream

    async def _answers(
        self, request_id: str, request: GenerationRequest, stream: Stream
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        counter = DraftCounter()
        first = True
        async with aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                counter.add(output)
                answer = response(request_id, output)
                if first:
                    answer.seed = request.seed
                    first = False
                if output.finish_reason is not None:
                    answer.usage.prompt_tokens = output.prompt_tokens
                    answer.usage.completion_tokens = output.completion_tokens
                    answer.draft_statistics.CopyFrom(counter.message())
                yield answer

    async def _poll(self, name: str, verifier: Verifier) -> None:
        while True:
            try:
                outputs = await verifier.next_outputs(self.name, POLL_S)
            except VerifierLost as error:
                self._lose(name, error)
                return
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # else its client left and the cancel is under way
                    stream.push(output)

    def _lose(self, name: str, error: VerifierLost) -> None:
        if name not in self._verifiers:
            return
        logger.warning("verifier %s was lost: %s", name, error)
        self._forget(name)
        for stream in self._streams.values():
            if stream.verifier == name:
                stream.finished = True
                stream.fail(Unavailable(f"verifier {name} was lost: {error}", 1.0))

    def _forget(self, name: str) -> None:
        self._verifiers.pop(name, None)
        self._polls.pop(name, None)
        self._draining.discard(name)

    def _load(self, name: str) -> int:
        return sum(stream.verifier == name for stream in self._streams.values())

    async def _cancel(self, request_id: str, stream: Stream) -> None:
        await self._cancel_engine(stream)
        self._release(request_id, stream)

    async def _cancel_submitted(
        self, submission: asyncio.Task[list[Refusal | None]], stream: Stream
    ) -> None:
        # A cancel that overtook its submit would find nothing to stop.
        await asyncio.wait([submission])
        if submission.exception() is None:
            await self._cancel_engine(stream)
        self._streams.pop(stream.engine_id, None)

    async def _cancel_engine(self, stream: Stream) -> None:
        verifier = self._verifiers.get(stream.verifier)
        if verifier is None:
            return
        try:
            await verifier.cancel([stream.engine_id])
        except VerifierLost as error:
            self._lose(stream.verifier, error)

    def _release(self, request_id: str, stream: Stream | None) -> None:
        if stream is not None:
            self._streams.pop(stream.engine_id, None)
        self._ids.discard(request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class GenerationService(pb_grpc.GenerationServicer):
    """outrider.v1.Generation over a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one answer. A lapsed deadline or a client's cancel ends this coroutine."""
        async with aclosing(self._gateway.generate(request)) as answers:
            async for answer in answers:
                yield answer


class ClusterService(pb_grpc.ClusterServicer):
    """outrider.v1.Cluster over a control plane."""

    def __init__(self, gateway: Gateway, control: ControlPlane) -> None:
        self._gateway = gateway
        self._control = control

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """The actors' state and the gateway's own numbers."""
        answer = to_message(await self._control.status())
        answer.ready = answer.ready and bool(self._gateway.verifiers)
        answer.requests_in_flight = self._gateway.in_flight
        answer.admission_limit = self._gateway.config.admission_limit
        answer.max_context = self._gateway.limits.max_context
        return answer

    async def Scale(
        self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScaleResponse:
        """Changes the counts of actors and waits for it."""
        wanted: dict[str, int | None] = {"drafters": None, "verifiers": None}
        if request.HasField("drafters"):
            wanted["drafters"] = request.drafters
        if request.HasField("verifiers"):
            wanted["verifiers"] = request.verifiers
        for role, count in wanted.items():
            if count is not None and count < 1:
                raise InvalidField(role, count, "give at least 1")
        if wanted["drafters"] is None and wanted["verifiers"] is None:
            raise InvalidField("scale", "nothing", "give drafters, verifiers or both")
        drafters, verifiers = await self._control.scale(wanted["drafters"], wanted["verifiers"])
        return pb.ScaleResponse(drafters=drafters, verifiers=verifiers)


class GatewayServer:
    """The grpc.aio server around a gateway, with health and reflection."""

    def __init__(self, gateway: Gateway, control: ControlPlane) -> None:
        self.gateway = gateway
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            interceptors=(ErrorInterceptor(),),
            options=server_options(gateway.config),
        )
        pb_grpc.add_GenerationServicer_to_server(GenerationService(gateway), self._server)
        pb_grpc.add_ClusterServicer_to_server(ClusterService(gateway, control), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> int:
        """Opens the port and returns it; nothing is served before `set_serving`."""
        config = self.gateway.config
        await self.set_serving(False)
        address = f"{config.host}:{config.port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"gateway.port: {address} cannot be opened; choose another") from error
        await self._server.start()
        return int(port)

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers."""
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Not serving at once, closed after the streams ended or the grace is over."""
        await self.set_serving(False)
        await self.gateway.stop(grace_s)
        await self._server.stop(1.0)


def server_options(config: GatewayConfig) -> list[tuple[str, int]]:
    """Limits on both directions, and room for clients that ping on an idle connection."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.so_reuseport", 0),
    ]
