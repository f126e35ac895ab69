"""Places the actors of a service, watches them, replaces and scales them.

Actors are named outrider/<service>/<role>/<n> in one namespace, and n is never used twice. Where
the cluster's nodes carry the label `outrider-role`, drafters and verifiers go to their own nodes;
on a cluster without any such label they go wherever there is room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.actors import (
    DrafterActor,
    GatewayActor,
    Loaded,
    VerifierActor,
    one_line,
)
from outrider.cluster.config import ServiceConfig, StartError
from outrider.cluster.placement import NAMESPACE, Handle, actor_name, nodes, placement, shortfall
from outrider.cluster.status import (
    DRAINING,
    LOST,
    READY,
    STARTING,
    EngineTotals,
    ReplicaStatus,
    RoleStatus,
    ServiceStatus,
)

logger = logging.getLogger(__name__)

NAME_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.05
STATUS_TIMEOUT_S = 2.0
LOAD_POLL_S = 0.5


_remote: Any = ray.remote  # its type stubs know nothing of concurrency groups
_ACTORS: Mapping[str, Any] = {
    "drafter": _remote(concurrency_groups={"control": 2})(DrafterActor),
    "verifier": _remote(concurrency_groups={"control": 4, "outputs": 4})(VerifierActor),
}
_GATEWAY: Any = ray.remote(GatewayActor)


@dataclass
class Replica:
    """One actor; owned by the controller."""

    role: str
    name: str
    handle: Handle
    state: str = STARTING
    facts: Mapping[str, Any] = field(default_factory=dict)
    probe: Any = None
    probed_at: float = 0.0


class Controller:
    """Desired and actual actors of one service; runs as an actor itself.

    `start` and `scale` take turns; `stop` ends a wait of theirs; `status` answers at any time.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        remote = config.placement == "remote"
        self._desired = {
            "drafter": config.counts.drafters if remote else 0,
            "verifier": config.counts.verifiers,
        }
        self._replicas: dict[str, Replica] = {}
        self._serials = {"drafter": 0, "verifier": 0}
        self._gateway: Handle | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Event()

    def start(self) -> Loaded:
        """Brings everything up; returns the address to talk to, or why there is none."""
        try:
            with self._lock:
                self._reconcile()
                port = self._open_gateway()
        except StartError as error:
            return Loaded(error=str(error))
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return Loaded(facts={"address": f"{self._config.gateway.host}:{port}"})

    def scale(self, drafters: int | None, verifiers: int | None) -> Loaded:
        """Changes the counts and waits until they are reached."""
        if drafters is not None and self._config.placement != "remote":
            return Loaded(
                invalid=True,
                error=f"drafters: {drafters} is not usable; this service's draft placement is "
                f"{self._config.placement}, so that it has no drafter actors",
            )
        with self._lock:
            before = dict(self._desired)
            self._desired["drafter"] = self._desired["drafter"] if drafters is None else drafters
            if verifiers is not None:
                self._desired["verifier"] = verifiers
            try:
                self._reconcile()
            except StartError as error:
                self._desired = before
                return Loaded(error=str(error))
            return Loaded(
                facts={
                    "drafters": len(self._ready("drafter")),
                    "verifiers": len(self._ready("verifier")),
                }
            )

    @ray.method(concurrency_group="control")
    def status(self) -> ServiceStatus:
        """Fresh numbers of every actor that answers, the last known ones of the others."""
        config = self._config
        replicas = list(self._replicas.values())
        self._refresh([replica for replica in replicas if replica.state in (READY, DRAINING)])
        totals = EngineTotals()
        for replica in replicas:
            if replica.role == "verifier" and "totals" in replica.facts:
                totals = totals.plus(replica.facts["totals"])
        return ServiceStatus(
            service=config.service,
            ready=self._gateway is not None and bool(self._ready("verifier")),
            roles=tuple(
                RoleStatus(
                    role,
                    desired,
                    tuple(_shown(replica) for replica in replicas if replica.role == role),
                )
                for role, desired in self._desired.items()
            ),
            requests_in_flight=0,
            admission_limit=config.gateway.admission_limit,
            target=config.target.path,
            head="" if config.placement == "none" else config.draft.head,
            draft_placement=config.placement,
            num_speculative_tokens=config.draft.num_speculative_tokens,
            totals=totals,
            max_context=config.target.max_context,
            version=_version(),
        )

    @ray.method(concurrency_group="control")
    def stop(self, grace_s: float) -> None:
        """Lets requests end within the grace, then ends every actor."""
        self._stopping.set()
        with self._lock:
            if self._gateway is not None:
                _wait(self._gateway.stop.remote(grace_s), grace_s + NAME_TIMEOUT_S)
                ray.kill(self._gateway)
                self._gateway = None
            for replica in list(self._replicas.values()):
                self._remove(replica)

    # Bringing actual counts to the desired ones.

    def _reconcile(self) -> None:
        for role in ("drafter", "verifier"):
            ready = self._ready(role)
            missing = self._desired[role] - len(ready)
            if missing > 0:
                self._grow(role, missing)
            elif missing < 0:
                self._shrink(ready[missing:])

    def _grow(self, role: str, count: int) -> None:
        timeout = self._config.control.start_timeout_s
        new = [self._create(role) for _ in range(count)]
        drafters = self._handles("drafter")
        loads: dict[Any, Replica] = {
            (
                replica.handle.load.remote()
                if role == "drafter"
                else replica.handle.load.remote(drafters)
            ): replica
            for replica in new
        }
        try:
            done, late = self._loaded(list(loads), timeout)
            if late:
                raise StartError(self._overdue(role, [loads[one] for one in late], timeout))
            for one in done:
                self._settle(loads[one], one)
        except StartError:
            for replica in new:
                self._remove(replica)
            raise
        for replica in new:
            if role == "drafter":
                self._announce_drafters()
            elif self._gateway is not None:
                _wait(
                    self._gateway.add_verifier.remote(replica.name, replica.handle),
                    self._config.control.call_timeout_s,
                )

    def _loaded(self, loads: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Waits for loads, but not on when the service is to stop."""
        give_up = time.monotonic() + timeout
        while True:
            left = min(LOAD_POLL_S, give_up - time.monotonic())
            done, late = ray.wait(loads, num_returns=len(loads), timeout=max(0.0, left))
            if not late or left < LOAD_POLL_S:
                return done, late
            if self._stopping.is_set():
                raise StartError("the service is stopping")

    def _create(self, role: str) -> Replica:
        serial = self._serials[role]
        self._serials[role] = serial + 1
        name = actor_name(self._config.service, role, serial)
        handle = (
            _ACTORS[role]
            .options(
                name=name,
                namespace=NAMESPACE,
                max_restarts=0,
                max_task_retries=0,
                **placement(role, self._config.resources, nodes()),
            )
            .remote(self._config, name)
        )
        replica = Replica(role, name, handle)
        self._replicas[name] = replica
        return replica

    def _settle(self, replica: Replica, reference: Any) -> None:
        try:
            loaded: Loaded = ray.get(reference, timeout=NAME_TIMEOUT_S)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            raise StartError(f"{replica.name} died while it loaded: {one_line(error)}") from error
        if loaded.error is not None:
            raise StartError(loaded.error)
        replica.facts = loaded.facts
        replica.state = READY

    def _overdue(self, role: str, late: list[Replica], timeout: float) -> str:
        probes: dict[Any, Replica] = {replica.handle.health.remote(): replica for replica in late}
        placed, unplaced = ray.wait(list(probes), num_returns=len(probes), timeout=1.0)
        if unplaced:
            need = shortfall(role, len(unplaced), self._config.resources, nodes())
            return f"{need}; gave up after {timeout:g} s"
        names = ", ".join(probes[one].name for one in placed)
        return (
            f"control.start_timeout_s: {timeout:g} is not usable; "
            f"{names} still loads after that time, give more"
        )

    def _shrink(self, surplus: list[Replica]) -> None:
        for replica in surplus:
            replica.state = DRAINING
        if surplus[0].role == "drafter":
            self._announce_drafters()
            give_up = time.monotonic() + self._config.control.drain_timeout_s
            while self._drafted_by(surplus) and time.monotonic() < give_up:
                time.sleep(DRAIN_POLL_S)
        elif self._gateway is not None:
            drains = [self._gateway.drain_verifier.remote(replica.name) for replica in surplus]
            timeout = self._config.control.drain_timeout_s
            ray.wait(drains, num_returns=len(drains), timeout=timeout)
        for replica in surplus:
            self._remove(replica)

    def _announce_drafters(self) -> None:
        handles = self._handles("drafter")
        for verifier in self._ready("verifier"):
            _wait(verifier.handle.set_drafters.remote(handles), self._config.control.call_timeout_s)

    def _drafted_by(self, drafters: list[Replica]) -> int:
        verifiers = self._ready("verifier")
        self._refresh(verifiers)
        names = {replica.name for replica in drafters}
        return sum(
            count
            for verifier in verifiers
            for name, count in verifier.facts.get("requests_per_drafter", {}).items()
            if name in names
        )

    def _open_gateway(self) -> int:
        facts = self._ready("verifier")[0].facts
        context = ray.get_runtime_context()
        # Beside its controller, hence on the machine where the service was started.
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        gateway = _GATEWAY.options(
            name=actor_name(self._config.service, "gateway", 0),
            namespace=NAMESPACE,
            num_cpus=0,
            scheduling_strategy=here,
        ).remote(self._config)
        limit = self._config.control.start_timeout_s
        load = gateway.load.remote(self._handles("verifier"), facts, context.current_actor)
        try:
            loaded: Loaded = ray.get(load, timeout=limit)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            raise StartError(f"the gateway did not start: {one_line(error)}") from error
        if loaded.error is not None:
            raise StartError(loaded.error)
        self._gateway = gateway
        return int(loaded.facts["port"])

    # Watching.

    def _watch(self) -> None:
        pause = self._config.control.health_interval_s
        retry_at, backoff = 0.0, pause
        while not self._stopping.wait(pause):
            with self._lock:
                for replica in [*self._ready("drafter"), *self._ready("verifier")]:
                    self._probe(replica)
                if time.monotonic() < retry_at or self._stopping.is_set():
                    continue
                try:
                    self._reconcile()
                    backoff = pause
                except StartError as error:
                    backoff = min(2 * backoff, 60.0)
                    retry_at = time.monotonic() + backoff
                    logger.error("no replacement: %s; next try in %g s", error, backoff)

    def _probe(self, replica: Replica) -> None:
        if replica.probe is None:
            replica.probe, replica.probed_at = replica.handle.health.remote(), time.monotonic()
            return
        try:
            replica.facts = {**replica.facts, **ray.get(replica.probe, timeout=0)}
            replica.probe = None
        except GetTimeoutError:
            silent = time.monotonic() - replica.probed_at
            if silent > self._config.control.health_timeout_s:
                self._give_up(replica, f"silent for {silent:.1f} s")
        except (RayActorError, RayTaskError) as error:
            self._give_up(replica, one_line(error))

    def _give_up(self, replica: Replica, reason: str) -> None:
        logger.warning("%s is lost: %s", replica.name, reason)
        self._remove(replica)
        if replica.role == "drafter":
            self._announce_drafters()

    def _refresh(self, replicas: list[Replica]) -> None:
        probes: dict[Any, Replica] = {
            replica.handle.health.remote(): replica for replica in replicas
        }
        if not probes:
            return
        done, _ = ray.wait(list(probes), num_returns=len(probes), timeout=STATUS_TIMEOUT_S)
        for one in done:
            replica = probes[one]
            try:
                replica.facts = {**replica.facts, **ray.get(one, timeout=STATUS_TIMEOUT_S)}
            except (RayActorError, RayTaskError, GetTimeoutError):
                replica.state = LOST  # the watch replaces it

    def _remove(self, replica: Replica) -> None:
        ray.kill(replica.handle)
        self._replicas.pop(replica.name, None)

    def _ready(self, role: str) -> list[Replica]:
        replicas = list(self._replicas.values())
        return [one for one in replicas if one.role == role and one.state == READY]

    def _handles(self, role: str) -> dict[str, Handle]:
        return {replica.name: replica.handle for replica in self._ready(role)}


def _wait(reference: Any, timeout_s: float) -> None:
    """Waits for a call whose failure the watch notices by itself."""
    try:
        ray.get(reference, timeout=timeout_s)
    except (RayActorError, RayTaskError, GetTimeoutError) as error:
        logger.warning("a control call failed: %s", one_line(error))


def _shown(replica: Replica) -> ReplicaStatus:
    facts = replica.facts
    names = ("node_id", "device", "sampler", "threads", "pid", "running_requests")
    more = ("waiting_requests", "kv_blocks_used", "kv_blocks_total")
    known = {name: facts[name] for name in (*names, *more) if name in facts}
    return ReplicaStatus(name=replica.name, state=replica.state, **known)


def _version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "checkout"
