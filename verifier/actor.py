"""An engine with a thread of its own, and bounded mail for the gateways it answers.

One thread loads the model, runs the rounds, and does between them what other threads ask for. It
must be the only one that computes. OpenMP gives every computing thread a team of its own; once the
teams outnumber the cores it puts them to sleep at every barrier, which costs a fifth of the speed.
A gateway asks for its outputs with one outstanding call at a time, which waits for something.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from outrider.protos.sampling import InvalidField
from outrider.verifier.engine import Engine
from outrider.verifier.types import GenerationRequest, QueueFull, Refusal, TokenOutput

logger = logging.getLogger(__name__)

MAX_MAIL = 65536  # outputs that a gateway may leave unread before its requests are cancelled
_IDLE_S = 1.0


class EngineFailed(RuntimeError):
    """The round loop has ended with an error; the process must be replaced."""


@dataclass
class _Pace:
    """Time spent in rounds that only decoded, and the tokens they gave."""

    tokens: int = 0
    seconds: float = 0.0


class VerifierActor:
    """Owns an engine. Every public method may be called from any thread."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Builds the engine in its thread; whatever `build` raises is raised here."""
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._mail: dict[str, list[TokenOutput]] = {}  # by gateway, not fetched yet
        self._owner: dict[str, str] = {}  # request id -> gateway
        self._pace = _Pace()
        self._stopping = False
        self._error: Exception | None = None
        built: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(build, built), name="rounds", daemon=True
        )
        self._thread.start()
        self._engine = built.result()

    @property
    def tokenizer(self) -> Any | None:
        """The target's, if it has one."""
        return self._engine.target.tokenizer

    def submit(self, gateway: str, requests: Sequence[GenerationRequest]) -> list[Refusal | None]:
        """Queues requests; per request None, or why it was refused."""
        self._check()
        answers: list[Refusal | None] = self._between_rounds(
            lambda: [self._submit(gateway, request) for request in requests]
        )
        return answers

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests before the next round; unknown ids are ignored."""
        self._check()

        def cancel() -> None:
            for request_id in request_ids:
                self._engine.cancel(request_id)

        self._between_rounds(cancel)

    def next_outputs(self, gateway: str, timeout_s: float) -> list[TokenOutput]:
        """What came for a gateway since its last call; waits for something, but not forever."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while gateway not in self._mail and self._error is None and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)
            outputs = self._mail.pop(gateway, [])
        if not outputs:
            self._check()
        return outputs

    def status(self) -> dict[str, Any]:
        """The engine's counters, and how fast it decodes.

        Raises:
            EngineFailed: the round loop has ended.
        """
        self._check()
        return {
            **asdict(self._engine.stats),
            "decode_tokens": self._pace.tokens,
            "decode_seconds": self._pace.seconds,
        }

    def shutdown(self) -> None:
        """Stops the round loop after the round under way, and lets the link go."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=30)
        self._engine.link.close_link()

    def _submit(self, gateway: str, request: GenerationRequest) -> Refusal | None:
        try:
            self._engine.submit(request)
        except InvalidField as error:
            return Refusal(str(error), retry=False)
        except QueueFull as error:
            return Refusal(str(error), retry=True)
        with self._changed:
            self._owner[request.request_id] = gateway
        return None

    def _between_rounds(self, call: Callable[[], Any]) -> Any:
        """Has the round loop make a call before its next round; returns or raises its outcome."""
        outcome: Future[Any] = Future()
        with self._changed:
            self._calls.append((call, outcome))
            self._changed.notify_all()
        while True:
            try:
                return outcome.result(timeout=_IDLE_S)
            except TimeoutError:
                self._check()
                if not self._thread.is_alive():
                    raise EngineFailed("the round loop has stopped") from None

    def _live(self, build: Callable[[], Engine], built: Future[Engine]) -> None:
        try:
            engine = build()
        except Exception as error:  # handed to whoever is waiting for the engine
            built.set_exception(error)
            return
        self._engine = engine
        built.set_result(engine)
        try:
            self._run(engine)
        except Exception as error:  # the thread's edge: every later call reports it
            logger.exception("the round loop has ended")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run(self, engine: Engine) -> None:
        while not self._stopping:
            with self._changed:
                while not (self._calls or engine.has_work() or self._stopping):
                    self._changed.wait(_IDLE_S)
                calls = list(self._calls)
                self._calls.clear()
            for call, outcome in calls:
                try:
                    outcome.set_result(call())
                except Exception as error:  # the caller's, not the loop's
                    outcome.set_exception(error)
            if engine.has_work() and not self._stopping:
                began = time.perf_counter()
                outputs = engine.step()
                self._measure(outputs, time.perf_counter() - began)
                self._deliver(outputs)

    def _measure(self, outputs: Sequence[TokenOutput], seconds: float) -> None:
        """Counts a round in which every answer was already under way."""
        tokens = sum(len(output.token_ids) for output in outputs)
        begun = all(output.completion_tokens > len(output.token_ids) for output in outputs)
        if tokens and begun:
            self._pace.tokens += tokens
            self._pace.seconds += seconds

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        with self._changed:
            for output in outputs:
                gateway = self._owner.get(output.request_id)
                if gateway is None:
                    continue
                self._mail.setdefault(gateway, []).append(output)
                if output.finish_reason is not None:
                    del self._owner[output.request_id]
            lost = [name for name, box in self._mail.items() if len(box) > MAX_MAIL]
            for name in lost:
                self._abandon(name)
            self._changed.notify_all()

    def _abandon(self, gateway: str) -> None:
        logger.warning("gateway %s reads nothing; its requests are cancelled", gateway)
        for request_id in [r for r, owner in self._owner.items() if owner == gateway]:
            del self._owner[request_id]
            self._engine.cancel(request_id)
        del self._mail[gateway]

    def _check(self) -> None:
        if self._error is not None:
            raise EngineFailed(f"the round loop has ended: {self._error!r}") from self._error
