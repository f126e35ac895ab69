"""How a gateway reaches a verifier: an actor elsewhere, or an object in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from outrider.cluster.placement import Handle
from outrider.verifier.types import GenerationRequest, Refusal, TokenOutput

Result = TypeVar("Result")


class VerifierLost(Exception):
    """The verifier is gone or no longer answers."""


class Verifier(Protocol):
    """What the gateway asks of a verifier; every call raises VerifierLost when there is none."""

    async def submit(
        self, gateway: str, requests: Sequence[GenerationRequest]
    ) -> list[Refusal | None]:
        """Hands requests over; per request None, or why it was refused."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Stops requests; unknown ids are ignored."""
        ...

    async def next_outputs(self, gateway: str, timeout_s: float) -> list[TokenOutput]:
        """New tokens of this gateway's requests, as soon as there are any."""
        ...


class RayVerifier:
    """A verifier actor; no call waits longer than it may."""

    def __init__(self, handle: Handle, call_timeout_s: float) -> None:
        self._handle = handle
        self._call_timeout_s = call_timeout_s

    async def submit(
        self, gateway: str, requests: Sequence[GenerationRequest]
    ) -> list[Refusal | None]:
        """See Verifier."""
        return await self._answer(self._handle.submit.remote(gateway, list(requests)))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """See Verifier."""
        await self._answer(self._handle.cancel.remote(list(request_ids)))

    async def next_outputs(self, gateway: str, timeout_s: float) -> list[TokenOutput]:
        """See Verifier."""
        return await self._answer(self._handle.next_outputs.remote(gateway, timeout_s), timeout_s)

    async def _answer(self, reference: Awaitable[Result], extra_s: float = 0.0) -> Result:
        try:
            return await asyncio.wait_for(reference, self._call_timeout_s + extra_s)
        except TimeoutError as error:
            raise VerifierLost(f"no answer within {self._call_timeout_s + extra_s:g} s") from error
        except (RayActorError, RayTaskError) as error:
            raise VerifierLost(str(error).strip().splitlines()[-1]) from error
