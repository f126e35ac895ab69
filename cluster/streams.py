"""One request in flight as the gateway sees it: unread outputs and how its drafts fared."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from outrider.cluster.errors import FailedRequest, Overloaded, ServiceError
from outrider.protos import outrider_pb2 as pb
from outrider.verifier.types import BONUS, RECOVERED, TokenOutput

_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


class DraftCounter:
    """Adds up one request's rounds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.undrafted_rounds = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def add(self, output: TokenOutput) -> None:
        """Counts one round's output; the text that a finish may add is not a round."""
        if not output.token_ids:
            return
        self.rounds += 1
        self.undrafted_rounds += output.drafted == 0
        missing = output.drafted - len(self.drafted)
        self.drafted.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for position in range(output.drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < output.accepted

    def message(self) -> pb.DraftStatistics:
        """The sums as the client gets them."""
        return pb.DraftStatistics(
            rounds=self.rounds,
            undrafted_rounds=self.undrafted_rounds,
            drafted_per_position=self.drafted,
            accepted_per_position=self.accepted,
            acceptance_length=acceptance_length(self.drafted, self.accepted),
        )


def acceptance_length(drafted: Sequence[int], accepted: Sequence[int]) -> float:
    """Tokens per target forward over the rounds that had a draft: the accepted ones and one."""
    return 1.0 + sum(accepted) / drafted[0] if drafted and drafted[0] else 0.0


class Stream:
    """What has arrived for one request and was not yet written to its client.

    The engine never waits for a client: a reader that lets more than `buffer` tokens pile up
    loses its request instead.
    """

    def __init__(self, engine_id: str, verifier: str, buffer: int) -> None:
        self.engine_id = engine_id
        self.verifier = verifier
        self.finished = False
        self._buffer = buffer
        self._unread: deque[TokenOutput] = deque()
        self._unread_tokens = 0
        self._failure: ServiceError | None = None
        self._arrived = asyncio.Event()

    def push(self, output: TokenOutput) -> None:
        """Takes one output from the engine."""
        if output.finish_reason == "error":
            self.finished = True
            self.fail(FailedRequest(output.error or "the engine gave no reason"))
            return
        self._unread.append(output)
        self._unread_tokens += len(output.token_ids)
        self.finished = output.finish_reason is not None
        if self._unread_tokens > self._buffer:
            self.fail(Overloaded(f"the client left more than {self._buffer} tokens unread", 1.0))
        self._arrived.set()

    def fail(self, failure: ServiceError) -> None:
        """Ends the stream with an error; what was unread is dropped."""
        self._failure = self._failure or failure
        self._unread.clear()
        self._arrived.set()

    async def outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """The outputs in order, up to and with the one that finishes the request."""
        while True:
            await self._arrived.wait()
            if self._failure is not None:
                raise self._failure
            output = self._unread.popleft()
            self._unread_tokens -= len(output.token_ids)
            if not self._unread:
                self._arrived.clear()
            yield output
            if output.finish_reason is not None:
                return


def response(request_id: str, output: TokenOutput) -> pb.GenerateResponse:
    """The message for one output."""
    return pb.GenerateResponse(
        request_id=request_id,
        text=output.text,
        token_ids=output.token_ids,
        origins=[_origin(origin) for origin in output.origins],
        finish_reason=(
            pb.FINISH_REASON_UNSPECIFIED
            if output.finish_reason is None
            else _FINISH[output.finish_reason]
        ),
    )


def _origin(origin: int) -> pb.Origin:
    if origin > 0:
        return pb.Origin(kind=pb.Origin.KIND_DRAFT, draft_position=origin)
    if origin == RECOVERED:
        return pb.Origin(kind=pb.Origin.KIND_RECOVERED)
    if origin == BONUS:
        return pb.Origin(kind=pb.Origin.KIND_BONUS)
    return pb.Origin(kind=pb.Origin.KIND_PLAIN)
