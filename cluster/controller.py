"""Places the actors of a service, watches them, replaces and scales them.

Actors are named outrider/<service>/<role>/<n> in one namespace, and n is never used twice. Where
the cluster's nodes carry the label `outrider-role`, drafters and verifiers go to their own nodes;
on a cluster without any such label they go wherever there is room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.actors import (
    DrafterActor,
    GatewayActor,
    Loaded,
    VerifierActor,
    one_line,
)
from outrider.cluster.config import ResourcesConfig, ServiceConfig
from outrider.cluster.status import (
    DRAINING,
    LOST,
    READY,
    STARTING,
    EngineTotals,
    LinkTotals,
    ReplicaStatus,
    RoleStatus,
    ServiceStatus,
)

logger = logging.getLogger(__name__)

NAMESPACE = "outrider"
LABEL = "outrider-role"
NAME_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.05


class StartError(RuntimeError):
    """A service that cannot be started or scaled; one line."""


@dataclass
class Replica:
    """One actor; owned by the controller."""

    role: str
    name: str
    handle: ActorHandle[Any]
    state: str = STARTING
    facts: Mapping[str, Any] = field(default_factory=dict)
    silent_since: float | None = None
