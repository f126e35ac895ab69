"""Joining or starting Ray, and starting a service on it."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.actors import Loaded, one_line
from outrider.cluster.config import ConfigError, Environment, ServiceConfig, StartError
from outrider.cluster.controller import Controller
from outrider.cluster.placement import NAMESPACE, Handle, actor_name, by_label, nodes
from outrider.cluster.status import ServiceStatus

logger = logging.getLogger(__name__)

PROBE_S = 5.0
LOCAL_CPUS = 16
CLAIM_S = 10.0
LOCAL_STORE_BYTES = 256 * 2**20

_remote: Any = ray.remote  # its type stubs know nothing of concurrency groups
_CONTROLLER: Any = _remote(concurrency_groups={"control": 4})(Controller)


def connect(address: str | None, config: ServiceConfig, environment: Environment) -> str:
    """Joins the cluster at `address`, or one that was started here and answers, or starts one.

    Returns what was done, in words. `address` "local" always starts one. A left-over address
    file of a dead cluster costs at most five seconds.
    """
    if not config.target.path:
        raise ConfigError("target.path", "", "name a model folder, a .gguf file or a hub id")
    if address == "local":
        return _start_local(config)
    if address is not None:
        if not _answers(address):
            raise ConfigError(
                "--address",
                address,
                f"no Ray cluster answers there within {PROBE_S:g} s; start one or leave it out",
            )
        return _join(address)
    found = environment.ray_address or _left_address(environment)
    if found is not None and found != "local" and _answers(found):
        return _join(found)
    return _start_local(config)


@dataclass(frozen=True)
class Service:
    """A running service, held by the process that started it."""

    address: str
    controller: Handle

    def status(self, timeout_s: float = 10.0) -> ServiceStatus:
        """The controller's view."""
        status: ServiceStatus = ray.get(self.controller.status.remote(), timeout=timeout_s)
        return status

    def stop(self, grace_s: float) -> None:
        """Drains and ends the service."""
        try:
            ray.get(self.controller.stop.remote(grace_s), timeout=grace_s + CLAIM_S)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            logger.warning("the service did not stop in order: %s", one_line(error))
        ray.kill(self.controller)


def start_service(
    config: ServiceConfig, progress: Callable[[ServiceStatus], None] | None = None
) -> Service:
    """Starts a service on the Ray that this process is connected to.

    progress: told the actors' states twice a second until all are ready.
    """
    controller = _claim(config)
    reference = controller.start.remote()
    give_up = time.monotonic() + 3 * config.control.start_timeout_s
    loaded: Loaded | None = None
    while loaded is None:
        try:
            loaded = ray.get(reference, timeout=0.5)
        except GetTimeoutError:
            if time.monotonic() > give_up:
                loaded = Loaded(error="control.start_timeout_s: the service did not start in time")
            elif progress is not None:
                progress(ray.get(controller.status.remote(), timeout=30.0))
        except (RayActorError, RayTaskError) as error:
            raise StartError(f"the controller failed: {one_line(error)}") from error
    if loaded.error is not None:
        ray.kill(controller)
        raise StartError(loaded.error)
    return Service(loaded.facts["address"], controller)


def placement_note(config: ServiceConfig) -> str:
    """How actors are placed on this cluster, for people."""
    if by_label(config.resources, nodes()):
        return "placing actors by the node label outrider-role"
    return "no node has the label outrider-role: placing actors wherever there is room"


def _claim(config: ServiceConfig) -> Handle:
    """The controller under its name, which is also what keeps a service single."""
    name = actor_name(config.service, "controller", 0)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    give_up = time.monotonic() + CLAIM_S
    while True:
        try:
            controller: Handle = _CONTROLLER.options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                lifetime="detached" if config.control.detached else None,
                scheduling_strategy=here,
            ).remote(config)
            return controller
        except ValueError as error:
            # Taken: by a live service, or by one that is on its way out.
            if _alive(name) or time.monotonic() > give_up:
                raise ConfigError(
                    "service", config.service, "it runs already; stop it or choose another name"
                ) from error
            time.sleep(0.1)


def _alive(name: str) -> bool:
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
        ray.get(handle.status.remote(), timeout=PROBE_S)
    except (ValueError, RayActorError, GetTimeoutError):
        return False
    return True


def _answers(address: str) -> bool:
    """Whether a gRPC server, as Ray's head is one, answers at host:port in time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except OSError:
        return False
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PROBE_S)
        except grpc.FutureTimeoutError:
            return False
    return True


def _left_address(environment: Environment) -> str | None:
    try:
        return environment.ray_address_file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _join(address: str) -> str:
    ray.init(
        address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING
    )
    return f"joined the Ray cluster at {address}"


def _start_local(config: ServiceConfig) -> str:
    resources = config.resources
    wanted = config.counts.verifiers * resources.verifier_cpus
    if config.placement == "remote":
        wanted += config.counts.drafters * resources.drafter_cpus
    ray.init(
        address="local",
        namespace=NAMESPACE,
        # Ray's CPUs are only names here: what computes is bounded by the actors' threads. There is
        # room to scale up; whether the cores are enough for it is for the person to see.
        num_cpus=max(LOCAL_CPUS, math.ceil(wanted)),
        object_store_memory=LOCAL_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return "started a local Ray"
