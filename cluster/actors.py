"""The Ray actors. They own a process, its threads and its place; the work is in what they wrap.

Models are loaded by `load`, never by a constructor: its answer carries a start-up error as one
line, where a constructor's exception would reach the controller as a wall of text. Control calls
have concurrency groups of their own, so that none of them queues behind a forward pass.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError

from outrider.cluster.config import ServiceConfig
from outrider.cluster.errors import InvalidRequest, Unavailable
from outrider.cluster.placement import Handle
from outrider.cluster.status import ServiceStatus
from outrider.cluster.threads import use_threads
from outrider.verifier.types import GenerationRequest, Refusal, TokenOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What an actor says when it is ready, or the one line that says why it cannot be.

    invalid: what was asked for can never be, not even later.
    """

    error: str | None = None
    invalid: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


class DrafterActor:
    """A drafter as an actor: `round` is the whole data plane."""

    def __init__(self, config: ServiceConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._endpoint: Any = None
        self._facts: dict[str, Any] = {}

    def load(self) -> Loaded:
        """Reads the head; returns what it runs on."""
        try:
            threads = use_threads(self._config.resources.drafter_threads)
            from outrider.cluster.endpoints import DraftEndpoint
            from outrider.cluster.loading import load_drafter

            drafter, facts = load_drafter(self._config, self._name)
            self._endpoint = DraftEndpoint(drafter, self._config.draft.max_support)
        except Exception as error:  # the process edge: the controller gets one line
            return _not_loaded(error)
        self._facts = {**_place(), "threads": threads, **facts}
        return Loaded(facts=self._facts)

    def attach(self) -> bytes:
        """The head's FeatureSpec, encoded."""
        spec: bytes = self._endpoint.attach()
        return spec

    def round(self, opens: list[bytes], verdict: bytes | None, closes: list[bytes]) -> bytes:
        """One round's messages in, its drafts out; all of them encoded."""
        drafts: bytes = self._endpoint.round(opens, verdict, closes)
        return drafts

    @ray.method(concurrency_group="control")
    def health(self) -> dict[str, Any]:
        """Answers at once, whatever the draft plane does."""
        return dict(self._facts)


class VerifierActor:
    """A verifier as an actor; the round loop runs in its own thread inside."""

    def __init__(self, config: ServiceConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._link: Any = None
        self._verifier: Any = None
        self._facts: dict[str, Any] = {}

    def load(self, drafters: Mapping[str, Handle]) -> Loaded:
        """Reads the target, attaches the drafters, starts the round loop."""
        try:
            threads = use_threads(self._config.resources.verifier_threads)
            from outrider.cluster.loading import load_verifier

            self._verifier, self._link, facts = load_verifier(
                self._config, drafters, self._name, threads
            )
        except Exception as error:  # the process edge: the controller gets one line
            return _not_loaded(error)
        self._facts = {**_place(), "threads": threads, **facts}
        return Loaded(facts=self._facts)

    @ray.method(concurrency_group="control")
    def submit(self, gateway: str, requests: list[GenerationRequest]) -> list[Refusal | None]:
        """Hands requests to the engine; per request None, or why it was refused."""
        refusals: list[Refusal | None] = self._verifier.submit(gateway, requests)
        return refusals

    @ray.method(concurrency_group="control")
    def cancel(self, request_ids: list[str]) -> None:
        """Stops requests at the next round."""
        self._verifier.cancel(request_ids)

    @ray.method(concurrency_group="outputs")
    def next_outputs(self, gateway: str, timeout_s: float) -> list[TokenOutput]:
        """The new tokens of a gateway's requests."""
        outputs: list[TokenOutput] = self._verifier.next_outputs(gateway, timeout_s)
        return outputs

    @ray.method(concurrency_group="control")
    def health(self) -> dict[str, Any]:
        """The engine's and the link's numbers; raises once the round loop has failed."""
        if self._verifier is None:
            return {}
        from outrider.cluster.loading import verifier_status

        return {**self._facts, **verifier_status(self._verifier, self._link)}

    @ray.method(concurrency_group="control")
    def set_drafters(self, drafters: Mapping[str, Handle]) -> None:
        """The drafters for requests from now on."""
        self._link.set_drafters(drafters)


class GatewayActor:
    """The gRPC server inside an async actor."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._server: Any = None

    async def load(
        self,
        verifiers: Mapping[str, Handle],
        facts: Mapping[str, Any],
        controller: Handle,
    ) -> Loaded:
        """Opens the port; facts are a verifier's."""
        from outrider.cluster.gateway import Gateway, GatewayServer
        from outrider.cluster.loading import load_encoder
        from outrider.cluster.requests import Limits

        try:
            limits = Limits(
                vocab_size=facts["vocab_size"],
                max_context=facts["max_context"],
                max_stop_strings=self._config.gateway.max_stop_strings,
            )
            encoder = await asyncio.to_thread(load_encoder, self._config)
            gateway = Gateway(self._config.gateway, limits, encoder)
            self._server = GatewayServer(gateway, RayControl(controller))
            port = await self._server.start()
        except Exception as error:  # the process edge: the controller gets one line
            return _not_loaded(error)
        for name, handle in verifiers.items():
            await self.add_verifier(name, handle)
        return Loaded(facts={**_place(), "port": port})

    async def add_verifier(self, name: str, handle: Handle) -> None:
        """Serves, now that there is one to serve with."""
        from outrider.cluster.verifiers import RayVerifier

        limit = self._config.control.call_timeout_s
        self._server.gateway.add_verifier(name, RayVerifier(handle, limit))
        await self._server.set_serving(True)

    async def drain_verifier(self, name: str) -> None:
        """Returns when the verifier has no request left."""
        await self._server.gateway.drain_verifier(name)

    async def stop(self, grace_s: float) -> None:
        """Lets the streams end, then closes the port."""
        await self._server.stop(grace_s)

    async def health(self) -> dict[str, Any]:
        """Answers while the event loop runs."""
        return {"in_flight": self._server.gateway.in_flight}


class RayControl:
    """The controller as the gateway sees it."""

    def __init__(self, controller: Handle) -> None:
        self._controller = controller

    async def status(self) -> ServiceStatus:
        """See ControlPlane."""
        status: ServiceStatus = await self._answer(self._controller.status.remote())
        return status

    async def scale(self, drafters: int | None, verifiers: int | None) -> tuple[int, int]:
        """See ControlPlane."""
        call = self._controller.scale.remote(drafters, verifiers)
        outcome: Loaded = await self._answer(call)
        if outcome.error is not None:
            raise InvalidRequest(outcome.error) if outcome.invalid else Unavailable(outcome.error)
        return outcome.facts["drafters"], outcome.facts["verifiers"]

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except RayActorError as error:
            raise Unavailable("the service's controller is gone") from error


def one_line(error: BaseException) -> str:
    """An exception's own words on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if lines else type(error).__name__


def _not_loaded(error: Exception) -> Loaded:
    logger.exception("an actor could not be loaded")
    return Loaded(error=one_line(error))


def _place() -> dict[str, Any]:
    return {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id()}
