"""Draft links: how a verifier reaches its drafters.

`InProcessDraftLink` calls a drafter in the verifier's own process. `RayDraftLink` shares drafter
actors with other verifiers: one ordinary actor call a round and drafter, whose argument is the
verdict and whose return value is the draft. The link owns the refs. A drafter that is lost, errs
or falls too far behind costs its requests their drafts, never their answers: they are *abandoned*
and decode plainly to their end, and a counter says so.

A verdict of more than 100 KiB (a long prompt's features) goes through Ray's object store; a round
of a few hundred requests stays inside the call.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from outrider.cluster.placement import Handle
from outrider.protos.codec import decode, encode
from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    MalformedMessage,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)
from outrider.verifier.link import Batch, no_drafts

logger = logging.getLogger(__name__)

UNANSWERED_ASKS = 2  # a drafter that owes this many drafts is only kept up to date until it pays
MAX_FAILURES = 3  # failed rounds in a row after which a drafter gets no more requests


class Drafter(Protocol):
    """The draft plane's side: see outrider.drafter."""

    def feature_spec(self) -> FeatureSpec: ...

    def open(self, request: RequestOpen) -> None: ...

    def close(self, request: RequestClose) -> None: ...

    def propose(self, verdicts: VerdictBatch) -> DraftBatch: ...


class LinkError(RuntimeError):
    """A drafter that cannot be attached; one line."""


@dataclass(frozen=True)
class LinkStats:
    """What a link has moved and what went wrong, since it was made."""

    draft_bytes: int = 0
    verdict_bytes: int = 0
    late_rounds: int = 0
    lost_drafters: int = 0
    abandoned_requests: int = 0
    malformed_messages: int = 0
    overflows: int = 0


class InProcessDraftLink:
    """A drafter in the verifier's process: the honest baseline and the single-GPU mode."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._spec: FeatureSpec | None = drafter.feature_spec()
        self._answers: list[DraftBatch] = []

    def open(self, request: RequestOpen) -> None:
        """Announces a request."""
        self._drafter.open(request)

    def close(self, request: RequestClose) -> None:
        """Forgets a request."""
        self._drafter.close(request)

    def send(self, verdicts: VerdictBatch) -> None:
        """Drafts at once: there is nobody to wait for."""
        if (verdicts.num_to_draft > 0).any():
            self._answers = [self._drafter.propose(verdicts)]
        else:
            self._drafter.propose(verdicts)

    def collect(self, wanted: Batch, deadline: float) -> DraftBatch:
        """The drafts that the last verdicts asked for."""
        answers, self._answers = self._answers, []
        return joined(answers)

    def take_feature_spec(self) -> FeatureSpec | None:
        """The head's features, once."""
        spec, self._spec = self._spec, None
        return spec

    def close_link(self) -> None:
        """Nothing to end."""

    @property
    def stats(self) -> LinkStats:
        """Nothing crosses a process boundary here."""
        return LinkStats()


@dataclass
class _Call:
    """An unanswered call. asked: the requests that want drafts back."""

    reference: Any
    size: int
    asked: frozenset[int]


@dataclass
class _Peer:
    """One drafter as a link sees it. requests: engine request id -> epoch."""

    name: str
    handle: Handle
    accepting: bool = True
    alive: bool = True
    failures: int = 0
    opens: dict[int, bytes] = field(default_factory=dict)
    closes: list[bytes] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    calls: deque[_Call] = field(default_factory=deque)

    @property
    def unanswered_bytes(self) -> int:
        return sum(call.size for call in self.calls)

    @property
    def unanswered_asks(self) -> int:
        return sum(bool(call.asked) for call in self.calls)


class RayDraftLink:
    """Drafter actors behind one DraftLink.

    A request sticks to one drafter, the least loaded when it is opened. Request ids get a secret
    mask on the wire, so that the ids of two verifiers cannot meet inside a shared drafter.
    """

    def __init__(
        self,
        drafters: Mapping[str, Handle],
        *,
        attach_timeout_s: float,
        max_in_flight: int,
        max_in_flight_bytes: int,
    ) -> None:
        self._attach_timeout_s = attach_timeout_s
        self._max_in_flight = max_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._mask = secrets.randbits(62)
        self._stats = LinkStats()
        self._lock = threading.Lock()
        self._update: dict[str, Handle] | None = None
        self._peers: dict[str, _Peer] = {}
        self._fingerprint: bytes | None = None
        self._spec: FeatureSpec | None = None
        for name, handle in drafters.items():
            self._attach(name, handle)

    # The protocol: all of it is called by the verifier's round loop alone.

    def open(self, request: RequestOpen) -> None:
        """Gives the request to the least loaded drafter; without one it decodes plainly.

        A request that begins again stays where it was.
        """
        self._apply_update()
        peer = self._peer_of(request.request_id)
        if peer is None:
            usable = [peer for peer in self._peers.values() if peer.alive and peer.accepting]
            if not usable:
                self._count(abandoned_requests=1)
                return
            peer = min(usable, key=lambda peer: len(peer.requests))
        peer.requests[request.request_id] = request.epoch
        peer.opens[request.request_id] = encode(
            dataclasses.replace(request, request_id=request.request_id ^ self._mask)
        )

    def close(self, request: RequestClose) -> None:
        """Lets the drafter forget the request, with the next verdict or at once if none comes."""
        peer = self._peer_of(request.request_id)
        if peer is None or peer.requests[request.request_id] != request.epoch:
            return  # abandoned before, or the drafter was told of a later life already
        del peer.requests[request.request_id]
        if peer.opens.pop(request.request_id, None) is None:
            peer.closes.append(
                encode(dataclasses.replace(request, request_id=request.request_id ^ self._mask))
            )
        if not peer.requests and peer.closes:
            self._call(peer, None, frozenset())

    def send(self, verdicts: VerdictBatch) -> None:
        """One call to each drafter that has requests in the batch."""
        self._apply_update()
        rows: dict[str, list[int]] = {}
        for row, request_id in enumerate(verdicts.request_ids.tolist()):
            peer = self._peer_of(request_id)
            if peer is not None:
                rows.setdefault(peer.name, []).append(row)
        for name, chosen in rows.items():
            peer = self._peers[name]
            part = _selected(verdicts, chosen)
            asked = frozenset(part.request_ids[part.num_to_draft > 0].tolist())
            if asked and peer.unanswered_asks >= UNANSWERED_ASKS:
                part = dataclasses.replace(part, num_to_draft=np.zeros_like(part.num_to_draft))
                asked = frozenset()
            masked = dataclasses.replace(part, request_ids=part.request_ids ^ self._mask)
            self._call(peer, encode(masked), asked)

    def collect(self, wanted: Batch, deadline: float) -> DraftBatch:
        """What is here by the deadline (of time.monotonic), in one batch."""
        ids = frozenset(wanted.request_ids.tolist())
        answers = [
            batch
            for peer in list(self._peers.values())
            if peer.calls
            for batch in self._answers(peer, ids, deadline)
        ]
        return joined(answers)

    def take_feature_spec(self) -> FeatureSpec | None:
        """The head's features, once."""
        spec, self._spec = self._spec, None
        return spec

    def close_link(self) -> None:
        """Takes every request back from the drafters."""
        for peer in self._peers.values():
            for request_id, epoch in list(peer.requests.items()):
                self.close(RequestClose(request_id, epoch))

    # Called from other threads.

    def set_drafters(self, drafters: Mapping[str, Handle]) -> None:
        """The drafters for requests from now on; others finish what they have."""
        with self._lock:
            self._update = dict(drafters)

    @property
    def stats(self) -> LinkStats:
        """A snapshot of the counters."""
        return self._stats

    @property
    def requests_per_drafter(self) -> dict[str, int]:
        """Open requests of each attached drafter."""
        return {name: len(peer.requests) for name, peer in list(self._peers.items())}

    # Helpers in call order.

    def _attach(self, name: str, handle: Handle) -> None:
        try:
            data: bytes = ray.get(handle.attach.remote(), timeout=self._attach_timeout_s)
        except (GetTimeoutError, RayActorError, RayTaskError) as error:
            raise LinkError(f"drafter {name} cannot be attached: {_line(error)}") from error
        spec = decode(data)
        if not isinstance(spec, FeatureSpec):
            raise LinkError(f"drafter {name} answered {type(spec).__name__} for a FeatureSpec")
        if self._fingerprint is None:
            self._fingerprint, self._spec = data, spec
        elif data != self._fingerprint:
            raise LinkError(f"drafter {name} has another head than its peers")
        self._peers[name] = _Peer(name, handle)

    def _apply_update(self) -> None:
        with self._lock:
            update, self._update = self._update, None
        if update is None:
            return
        for name, peer in list(self._peers.items()):
            peer.accepting = name in update
            if not peer.accepting and not peer.requests:
                del self._peers[name]
        for name, handle in update.items():
            if name not in self._peers:
                try:
                    self._attach(name, handle)
                except LinkError as error:
                    logger.warning("%s", error)

    def _peer_of(self, request_id: int) -> _Peer | None:
        for peer in self._peers.values():
            if request_id in peer.requests:
                return peer
        return None

    def _call(self, peer: _Peer, verdict: bytes | None, asked: frozenset[int]) -> None:
        size = len(verdict or b"")
        full = len(peer.calls) >= self._max_in_flight
        if full or peer.unanswered_bytes + size > self._max_in_flight_bytes:
            # The requests of this verdict miss features from now on, whatever comes later.
            self._count(overflows=1)
            self._abandon(peer, "it is too far behind")
            return
        opens, closes = list(peer.opens.values()), peer.closes
        peer.opens, peer.closes = {}, []
        reference = peer.handle.round.remote(opens, verdict, closes)
        peer.calls.append(_Call(reference, size, asked))
        self._count(verdict_bytes=size)

    def _answers(self, peer: _Peer, wanted: frozenset[int], deadline: float) -> list[DraftBatch]:
        # An actor answers in order: waiting ends with the last call that owes a wanted draft.
        owed = sum(not wanted.isdisjoint(call.asked) for call in peer.calls)
        batches: list[DraftBatch] = []
        while peer.calls:
            call = peer.calls[0]
            try:
                data: bytes = ray.get(
                    call.reference,
                    timeout=max(0.0, deadline - time.monotonic()) if owed else 0.0,
                )
            except GetTimeoutError:
                self._count(late_rounds=int(owed > 0))
                break
            except RayActorError as error:
                self._lose(peer, error)
                break
            except RayTaskError as error:
                self._fail(peer, error)
                data = b""
            peer.calls.popleft()
            owed -= not wanted.isdisjoint(call.asked)
            if data:
                batches.extend(self._decoded(peer, data))
        return batches

    def _decoded(self, peer: _Peer, data: bytes) -> list[DraftBatch]:
        try:
            batch = decode(data)
        except MalformedMessage as error:
            self._count(malformed_messages=1)
            self._fail(peer, error)
            return []
        if not isinstance(batch, DraftBatch):
            self._count(malformed_messages=1)
            self._fail(
                peer, MalformedMessage("message", type(batch).__name__, "answer with a DraftBatch")
            )
            return []
        peer.failures = 0
        self._count(draft_bytes=len(data))
        return [dataclasses.replace(batch, request_ids=batch.request_ids ^ self._mask)]

    def _lose(self, peer: _Peer, error: Exception) -> None:
        peer.alive = False
        peer.calls.clear()
        self._count(lost_drafters=1)
        self._abandon(peer, _line(error))
        del self._peers[peer.name]

    def _fail(self, peer: _Peer, error: Exception) -> None:
        peer.failures += 1
        peer.alive = peer.failures < MAX_FAILURES
        self._abandon(peer, _line(error))

    def _abandon(self, peer: _Peer, reason: str) -> None:
        if peer.requests:
            logger.warning(
                "drafter %s: %s; %d requests go on without drafts",
                peer.name,
                reason,
                len(peer.requests),
            )
        self._count(abandoned_requests=len(peer.requests))
        for request_id, epoch in list(peer.requests.items()):
            del peer.requests[request_id]
            if peer.opens.pop(request_id, None) is None:
                peer.closes.append(encode(RequestClose(request_id ^ self._mask, epoch)))

    def _count(self, **more: int) -> None:
        values = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = dataclasses.replace(self._stats, **values)


def _selected(verdicts: VerdictBatch, rows: Sequence[int]) -> VerdictBatch:
    if len(rows) == len(verdicts.request_ids):
        return verdicts
    index = np.asarray(rows, dtype=np.int64)
    starts, ends = verdicts.cu_tokens[index], verdicts.cu_tokens[index + 1]
    tokens = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    return dataclasses.replace(
        verdicts,
        request_ids=verdicts.request_ids[index],
        epochs=verdicts.epochs[index],
        base_lengths=verdicts.base_lengths[index],
        num_accepted=verdicts.num_accepted[index],
        num_to_draft=verdicts.num_to_draft[index],
        cu_tokens=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
        token_ids=verdicts.token_ids[tokens],
        features=verdicts.features[tokens],
    )


def joined(batches: Sequence[DraftBatch]) -> DraftBatch:
    """One batch with all entries of those that have the newest versions."""
    if not batches:
        return no_drafts()
    newest = max((batch.target_version, batch.head_version) for batch in batches)
    batches = [batch for batch in batches if (batch.target_version, batch.head_version) == newest]
    if len(batches) == 1:
        return batches[0]

    def rows(name: str) -> Any:
        return np.concatenate([getattr(batch, name) for batch in batches])

    def offsets(name: str) -> Any:
        sizes = [np.diff(getattr(batch, name)) for batch in batches]
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int32)

    plain = ("request_ids", "epochs", "base_lengths", "last_token_ids", "token_ids", "parents")
    support = ("support_ids", "support_weights")
    sums = ("cu_num_draft_tokens", "cu_support")
    return dataclasses.replace(
        batches[-1],
        deterministic=all(batch.deterministic for batch in batches),
        **{name: rows(name) for name in (*plain, *support)},
        **{name: offsets(name) for name in sums},
    )


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
