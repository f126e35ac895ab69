"""Python clients of a running service, blocking and asynchronous.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32, temperature=0).text)

A request that fails with UNAVAILABLE before its first token is sent again, under the same
request id, so that it cannot run twice; after the first token the error reaches the caller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from outrider.cluster.completion import (
    Chunk,
    Completion,
    Options,
    Prompt,
    join,
    to_chunk,
    to_request,
)
from outrider.cluster.status import ServiceStatus, from_message
from outrider.protos import outrider_pb2 as pb
from outrider.protos import outrider_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_MESSAGE_BYTES = 16 * 2**20
ATTEMPTS = 5
BACKOFF_S = 0.1


class CallFailed(Exception):
    """The service refused or failed a call.

    code: the gRPC status. retry_after_s: the service's advice, where it gave one.
    """

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = error.code()
        self.details: str = error.details() or ""
        metadata: Any = error.trailing_metadata() or ()
        after = next((value for key, value in metadata if key == "retry-after"), None)
        self.retry_after_s = None if after is None else float(after)
        super().__init__(f"{self.code.name}: {self.details}")


class _Attempts:
    """Decides whether and when a call goes out again; one object a call."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._made = 0

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def wait_s(self, error: grpc.RpcError, answered: bool) -> float:
        """Seconds until the next attempt; raises CallFailed when there is none."""
        self._made += 1
        code = error.code()
        # A stopping server cancels calls that it has not looked at; and the attempt before may
        # not have been forgotten yet.
        again = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or (
            code is grpc.StatusCode.ALREADY_EXISTS and self._made > 1
        )
        pause = BACKOFF_S * float(2 ** (self._made - 1))
        if answered or not again or self._made >= ATTEMPTS or pause > self.remaining_s:
            raise CallFailed(error) from error
        return pause


def _channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _chosen(options: Options | None, fields: Mapping[str, Any]) -> Options:
    return dataclasses.replace(options or Options(), **fields)


class Client:
    """A blocking client.

    timeout_s: the deadline of every call that names none. The channel is made at the first call
    of each process, so that a client may be carried over a fork.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._options = _channel_options(max_message_bytes)
        self._channel: tuple[int, grpc.Channel] | None = None

    def stream(
        self,
        prompt: Prompt,
        options: Options | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generator[Chunk, None, None]:
        """The answer piece by piece; `fields` are those of Options.

        Closing the iterator early cancels the request.
        """
        request = to_request(prompt, _chosen(options, fields), request_id or secrets.token_hex(8))
        attempts = _Attempts(timeout_s or self._timeout_s)
        stub = pb_grpc.GenerationStub(self._connected())
        while True:
            answered = False
            call = stub.Generate(request, timeout=attempts.remaining_s)
            try:
                for response in call:
                    answered = True
                    yield to_chunk(response)
                return
            except grpc.RpcError as error:
                time.sleep(attempts.wait_s(error, answered))
            finally:
                call.cancel()

    def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Completion:
        """The whole answer; `fields` are those of Options."""
        return join(
            self.stream(prompt, options, request_id=request_id, timeout_s=timeout_s, **fields)
        )

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Completion:
        """The assistant's next message after messages with `role` and `content`."""
        return self.generate(messages, **fields)

    def status(self, timeout_s: float = 30.0) -> ServiceStatus:
        """The state of the service."""
        stub = pb_grpc.ClusterStub(self._connected())
        try:
            return from_message(stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise CallFailed(error) from error

    def scale(
        self,
        *,
        drafters: int | None = None,
        verifiers: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, int]:
        """Changes the counts; returns those reached as (drafters, verifiers)."""
        stub = pb_grpc.ClusterStub(self._connected())
        request = pb.ScaleRequest(drafters=drafters, verifiers=verifiers)
        try:
            answer = stub.Scale(request, timeout=timeout_s or self._timeout_s)
        except grpc.RpcError as error:
            raise CallFailed(error) from error
        return answer.drafters, answer.verifiers

    def close(self) -> None:
        """Closes the channel; a later call opens a new one."""
        if self._channel is not None and self._channel[0] == os.getpid():
            self._channel[1].close()
        self._channel = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connected(self) -> grpc.Channel:
        if self._channel is None or self._channel[0] != os.getpid():
            channel = grpc.insecure_channel(self.address, options=self._options)
            self._channel = (os.getpid(), channel)
        return self._channel[1]


class AsyncClient:
    """The same for asyncio; one channel for each event loop it is used in."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._options = _channel_options(max_message_bytes)
        self._channel: tuple[asyncio.AbstractEventLoop, grpc.aio.Channel] | None = None

    async def stream(
        self,
        prompt: Prompt,
        options: Options | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """The answer piece by piece; leaving the iterator or its task cancels the request."""
        request = to_request(prompt, _chosen(options, fields), request_id or secrets.token_hex(8))
        attempts = _Attempts(timeout_s or self._timeout_s)
        stub = pb_grpc.GenerationStub(self._connected())
        while True:
            answered = False
            call = stub.Generate(request, timeout=attempts.remaining_s)
            try:
                async for response in call:
                    answered = True
                    yield to_chunk(response)
                return
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.wait_s(error, answered))
            finally:
                call.cancel()

    async def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Completion:
        """The whole answer; `fields` are those of Options."""
        chunks = self.stream(prompt, options, request_id=request_id, timeout_s=timeout_s, **fields)
        return join([chunk async for chunk in chunks])

    async def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Completion:
        """The assistant's next message after messages with `role` and `content`."""
        return await self.generate(messages, **fields)

    async def status(self, timeout_s: float = 30.0) -> ServiceStatus:
        """The state of the service."""
        stub = pb_grpc.ClusterStub(self._connected())
        try:
            return from_message(await stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from error

    async def scale(
        self,
        *,
        drafters: int | None = None,
        verifiers: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, int]:
        """Changes the counts; returns those reached as (drafters, verifiers)."""
        stub = pb_grpc.ClusterStub(self._connected())
        request = pb.ScaleRequest(drafters=drafters, verifiers=verifiers)
        try:
            answer = await stub.Scale(request, timeout=timeout_s or self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error) from error
        return answer.drafters, answer.verifiers

    async def close(self) -> None:
        """Closes the channel; a later call opens a new one."""
        if self._channel is not None:
            await self._channel[1].close(None)
        self._channel = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _connected(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._channel is None or self._channel[0] is not loop:
            channel = grpc.aio.insecure_channel(self.address, options=self._options)
            self._channel = (loop, channel)
        return self._channel[1]
