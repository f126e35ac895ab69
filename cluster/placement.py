"""Where actors go: by the label `outrider-role` if the cluster's nodes carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from outrider.cluster.config import ResourcesConfig

NAMESPACE = "outrider"
LABEL = "outrider-role"

Node = Mapping[str, Any]
"""One entry of ray.nodes()."""
Handle = Any
"""A Ray actor handle; its methods' types are those of the actor's class."""


def nodes() -> list[Node]:
    """The cluster's nodes, dead ones too."""
    found: list[Node] = ray.nodes()
    return found


def actor_name(service: str, role: str, serial: int) -> str:
    """outrider/<service>/<role>/<n>."""
    return f"outrider/{service}/{role}/{serial}"


def by_label(resources: ResourcesConfig, nodes: Sequence[Node]) -> bool:
    """Whether roles have nodes of their own."""
    if resources.labels == "auto":
        return any(LABEL in node.get("Labels", {}) for node in nodes if node["Alive"])
    return resources.labels == "always"


def needs(role: str, resources: ResourcesConfig) -> dict[str, float]:
    """Ray resources of one actor, without those it needs none of."""
    cpus = resources.drafter_cpus if role == "drafter" else resources.verifier_cpus
    gpus = resources.drafter_gpus if role == "drafter" else resources.verifier_gpus
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def placement(role: str, resources: ResourcesConfig, nodes: Sequence[Node]) -> dict[str, Any]:
    """The actor options that place one actor of a role."""
    need = needs(role, resources)
    options: dict[str, Any] = {
        "num_cpus": need.get("CPU", 0),
        "num_gpus": need.get("GPU", 0),
    }
    if by_label(resources, nodes):
        options["label_selector"] = {LABEL: role}
    return options


def shortfall(role: str, count: int, resources: ResourcesConfig, nodes: Sequence[Node]) -> str:
    """What is missing for `count` more actors, in one line."""
    alive = [node for node in nodes if node["Alive"]]
    where = ""
    if by_label(resources, nodes):
        where = f" with the label {LABEL}={role}"
        alive = [node for node in alive if node.get("Labels", {}).get(LABEL) == role]
        if not alive:
            return f"no node{where}: {count} {role}(s) found no place"
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs(role, resources).items())
    there = ", ".join(
        " and ".join(
            f"{node['Resources'].get(name, 0):g} {name}" for name in needs(role, resources)
        )
        for node in alive
    )
    return (
        f"{count} {role}(s) found no place: each needs {wanted or 'a node'}; "
        f"the {len(alive)} node(s){where} have {there} in all, shared with the other actors"
    )
