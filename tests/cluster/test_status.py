"""Statuses survive the wire; totals add and subtract."""

from __future__ import annotations

from outrider.cluster.status import (
    READY,
    EngineTotals,
    LinkTotals,
    ReplicaStatus,
    RoleStatus,
    ServiceStatus,
    from_message,
    to_message,
)

TOTALS = EngineTotals(
    rounds=5,
    tokens=9,
    drafted_per_position=(4, 3),
    accepted_per_position=(3, 1),
    draft_bytes=2**40,
    decode_seconds=0.5,
    link=LinkTotals(overflows=2),
)


def test_a_status_is_the_same_after_the_wire() -> None:
    status = ServiceStatus(
        service="s",
        ready=True,
        roles=(RoleStatus("verifier", 2, (ReplicaStatus("v", READY, pid=7, threads=2),)),),
        requests_in_flight=3,
        admission_limit=4,
        target="t",
        head="h",
        draft_placement="remote",
        num_speculative_tokens=2,
        totals=TOTALS,
        max_context=64,
        version="1",
    )
    assert from_message(to_message(status)) == status


def test_totals_of_different_width_add_and_subtract() -> None:
    other = EngineTotals(drafted_per_position=(1, 1, 1), accepted_per_position=(1, 0, 0))
    both = TOTALS.plus(other)
    assert both.drafted_per_position == (5, 4, 1)
    assert both.accepted_per_position == (4, 1, 0)
    assert both.minus(other).link == TOTALS.link
    assert both.minus(other).draft_bytes == TOTALS.draft_bytes
