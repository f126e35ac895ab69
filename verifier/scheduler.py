"""Continuous batching: which requests run in a round, and with how many of their tokens.

Requests that decode run in every round. Prompts are run in chunks, all of them together at most
`prefill_chunk` tokens a round. Blocks are taken as a request grows; when they run out, the
request admitted last is preempted: it loses its blocks and begins again, first in the queue. One
request alone always fits, so that the oldest one never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.verifier.kv_cache import BlockAllocator
from outrider.verifier.request import Request
from outrider.verifier.types import EngineConfig, QueueFull


@dataclass(frozen=True)
class Work:
    """Known tokens of one request to run: `rows` of them from position `start` on."""

    request: Request
    start: int
    rows: int

    @property
    def samples(self) -> bool:
        """Whether the next token is drawn: nothing known is left to run."""
        return self.start + self.rows == self.request.committed


@dataclass(frozen=True)
class Schedule:
    """A round. preempted: requests that lost their blocks, in the epoch they are in now."""

    work: tuple[Work, ...]
    preempted: tuple[Request, ...]


class Scheduler:
    """The queue and the running requests, oldest first."""

    def __init__(self, config: EngineConfig, allocator: BlockAllocator, max_context: int) -> None:
        self._config = config
        self._allocator = allocator
        self._max_context = max_context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFull: as many wait as may.
        """
        # Those that will run in the next round anyway do not count as waiting.
        room = self._config.max_waiting + self._config.max_batch - len(self.running)
        if len(self.waiting) >= room:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request and takes its blocks back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._allocator.release(request.blocks)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks and puts it in front of the queue."""
        self.running.remove(request)
        self._allocator.release(request.blocks)
        self.waiting.appendleft(request)

    def next(self) -> Schedule:
        """Chooses the work of a round and sees to its blocks."""
        budget = self._config.prefill_chunk
        work: list[Work] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if request not in self.running:
                continue  # an older one needed its blocks
            rows = request.pending if request.pending == 1 else min(request.pending, budget)
            if rows == 0:
                continue
            if self._grow(request, request.computed + rows + request.asked, preempted):
                budget -= rows if request.pending > 1 else 0
                work.append(Work(request, request.computed, rows))
        while self.waiting and len(self.running) < self._config.max_batch and budget > 0:
            if preempted or not self._fits(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            rows = min(request.pending, budget)
            self._grow(request, rows, preempted)
            budget -= rows
            work.append(Work(request, 0, rows))
        return Schedule(tuple(work), tuple(preempted))

    def check_integrity(self) -> None:
        """Blocks and lengths are in step; between rounds."""
        self._allocator.check_integrity(request.blocks for request in self)
        size = self._config.block_size
        for request in self.running:
            assert request.pending >= 1, f"request {request.number} ran ahead"
            assert len(request.blocks) * size >= request.computed
            assert request.num_output == 0 or request.pending == 1 or not request.asked
        for request in self.waiting:
            assert not request.blocks and request.computed == 0 and not request.opened

    def _fits(self, request: Request) -> bool:
        # Room for the whole prompt and the next round, so that admission does not preempt.
        length = min(request.committed + request.num_speculative_tokens, self._max_context)
        return self._blocks(length) <= self._allocator.free

    def _grow(self, request: Request, length: int, preempted: list[Request]) -> bool:
        """Gives a running request the blocks for a length; False if it had to give its own."""
        missing = self._blocks(length) - len(request.blocks)
        while missing > self._allocator.free:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        if missing > 0:
            self._allocator.extend(request.blocks, missing)
        return True

    def _blocks(self, length: int) -> int:
        return -(-length // self._config.block_size)
