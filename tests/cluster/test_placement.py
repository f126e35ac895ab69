"""Where actors go, and what is said when they cannot."""

from __future__ import annotations

from outrider.cluster.config import ResourcesConfig
from outrider.cluster.placement import Node, placement, shortfall


def node(role: str | None, alive: bool = True, **resources: float) -> Node:
    labels = {} if role is None else {"outrider-role": role}
    return {"Alive": alive, "Labels": labels, "Resources": resources}


def test_labels_are_used_once_any_living_node_has_them() -> None:
    resources = ResourcesConfig()
    assert "label_selector" not in placement("drafter", resources, [node(None, CPU=4)])
    assert "label_selector" not in placement("drafter", resources, [node("drafter", alive=False)])
    chosen = placement("drafter", resources, [node(None, CPU=4), node("verifier", CPU=4)])
    assert chosen["label_selector"] == {"outrider-role": "drafter"}


def test_labels_can_be_forced_and_forbidden() -> None:
    always, never = ResourcesConfig(labels="always"), ResourcesConfig(labels="never")
    assert "label_selector" in placement("verifier", always, [node(None)])
    assert "label_selector" not in placement("verifier", never, [node("verifier")])


def test_a_missing_label_is_named() -> None:
    text = shortfall("drafter", 2, ResourcesConfig(), [node("verifier", CPU=8)])
    assert "outrider-role=drafter" in text and "no node" in text


def test_wanted_and_present_amounts_are_named() -> None:
    resources = ResourcesConfig(drafter_cpus=4, drafter_gpus=1)
    text = shortfall("drafter", 1, resources, [node(None, CPU=4)])
    assert "each needs 4 CPU and 1 GPU" in text
    assert "4 CPU and 0 GPU" in text
