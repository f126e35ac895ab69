"""What a request can fail with, and the one place where exceptions become gRPC statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from outrider.protos.sampling import InvalidField

logger = logging.getLogger(__name__)


class ServiceError(Exception):
    """A failure with the status that the client gets.

    retry_after_s: when set, the trailing metadata say after how long to try again.
    """

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(ServiceError):
    """More requests in flight, or more unread text, than the gateway holds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DuplicateRequest(ServiceError):
    """The request id is in flight."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unavailable(ServiceError):
    """The actor that served the request is gone, or the service is stopping."""

    code = grpc.StatusCode.UNAVAILABLE


class InvalidRequest(ServiceError):
    """The engine refused the request; its words name field, value and remedy."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class FailedRequest(ServiceError):
    """The engine failed this one request."""

    code = grpc.StatusCode.INTERNAL


class OutOfTime(ServiceError):
    """A control operation did not end within its limit."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a call that raised with the status that belongs to the exception."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handlers of this project's own services."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/outrider."):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded_stream(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guarded(handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )


def _guarded(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Exception as error:  # the process edge: nothing may pass but a status
            failure = error
        await _abort(context, failure)

    return call


def _guarded_stream(
    method: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def call(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
            return
        except Exception as error:  # the process edge: nothing may pass but a status
            failure = error
        await _abort(context, failure)

    return call


async def _abort(context: Any, error: Exception) -> None:
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ServiceError):
        code, message = error.code, str(error)
        if error.retry_after_s is not None:
            metadata = (("retry-after", f"{error.retry_after_s:g}"),)
    elif isinstance(error, InvalidField):
        code, message = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    else:
        logger.error("a call failed", exc_info=error)
        code, message = grpc.StatusCode.INTERNAL, "internal error; the service's log has it"
    await context.abort(code, message, metadata)
