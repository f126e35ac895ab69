"""The state of a service as its controller, gateway and clients pass it on."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from outrider.protos import outrider_pb2 as pb

STARTING, READY, DRAINING, LOST = "starting", "ready", "draining", "lost"

Record = TypeVar("Record")


@dataclass(frozen=True)
class ReplicaStatus:
    """One actor."""

    name: str
    state: str
    node_id: str = ""
    device: str = ""
    sampler: str = ""
    threads: int = 0
    pid: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True)
class RoleStatus:
    """All actors of one role."""

    role: str
    desired: int
    replicas: tuple[ReplicaStatus, ...]


@dataclass(frozen=True)
class LinkTotals:
    """What the draft links saw beyond ordinary traffic."""

    lost_drafters: int = 0
    abandoned_requests: int = 0
    malformed_messages: int = 0
    overflows: int = 0


@dataclass(frozen=True)
class EngineTotals:
    """Work done since the start of the verifiers that are alive."""

    rounds: int = 0
    undrafted_rounds: int = 0
    tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    draft_bytes: int = 0
    verdict_bytes: int = 0
    stale_drafts: int = 0
    late_rounds: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    link: LinkTotals = field(default_factory=LinkTotals)

    def plus(self, other: EngineTotals) -> EngineTotals:
        """The sum over two verifiers."""
        return _combined(self, other, 1)

    def minus(self, earlier: EngineTotals) -> EngineTotals:
        """What was done since an earlier reading."""
        return _combined(self, earlier, -1)


@dataclass(frozen=True)
class ServiceStatus:
    """The whole service."""

    service: str
    ready: bool
    roles: tuple[RoleStatus, ...]
    requests_in_flight: int
    admission_limit: int
    target: str
    head: str
    draft_placement: str
    num_speculative_tokens: int
    totals: EngineTotals
    max_context: int
    version: str

    def replicas(self, role: str) -> tuple[ReplicaStatus, ...]:
        """The actors of one role."""
        return next((item.replicas for item in self.roles if item.role == role), ())


def to_message(status: ServiceStatus) -> pb.GetStatusResponse:
    """The status as it goes to a client: the records have the messages' field names."""
    fields = dataclasses.asdict(status)
    for role in fields["roles"]:
        for replica in role["replicas"]:
            replica["state"] = f"STATE_{replica['state'].upper()}"
    return json_format.ParseDict(fields, pb.GetStatusResponse())


def from_message(message: pb.GetStatusResponse) -> ServiceStatus:
    """The status as a client holds it."""
    status: ServiceStatus = _record(ServiceStatus, message)
    return status


def _record(kind: Any, message: Message) -> Any:
    values: dict[str, Any] = {}
    hints: dict[str, Any] = typing.get_type_hints(kind)
    for name, hint in hints.items():
        value = getattr(message, name)
        item: Any = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        if item is not None:
            values[name] = tuple(
                _record(item, one) if dataclasses.is_dataclass(item) else one for one in value
            )
        elif dataclasses.is_dataclass(hint):
            values[name] = _record(hint, value)
        elif name == "state":
            values[name] = pb.ReplicaStatus.State.Name(value).removeprefix("STATE_").lower()
        else:
            values[name] = value
    return kind(**values)


def _combined(left: Record, right: Record, sign: int) -> Record:
    values: dict[str, Any] = {}
    for item in dataclasses.fields(left):  # type: ignore[arg-type]
        one, other = getattr(left, item.name), getattr(right, item.name)
        if isinstance(one, tuple):
            pairs = itertools.zip_longest(one, other, fillvalue=0)
            values[item.name] = tuple(a + sign * b for a, b in pairs)
        elif dataclasses.is_dataclass(one):
            values[item.name] = _combined(one, other, sign)
        else:
            values[item.name] = one + sign * other
    return type(left)(**values)
