"""What the gateway counts and passes on, by hand-made outputs."""

from __future__ import annotations

import pytest

from outrider.cluster.streams import DraftCounter, Stream, response
from outrider.protos import outrider_pb2 as pb
from outrider.verifier.types import BONUS, PLAIN, RECOVERED, TokenOutput


def output(
    origins: tuple[int, ...], drafted: int, accepted: int, total: int, finish: str | None = None
) -> TokenOutput:
    ids = tuple(range(len(origins)))
    return TokenOutput("r", ids, origins, "", finish, None, drafted, accepted, 3, total)


def test_rounds_are_added_up_by_position() -> None:
    counter = DraftCounter()
    counter.add(output((PLAIN,), 0, 0, 1))
    counter.add(output((1, 2, BONUS), 2, 2, 4))
    counter.add(output((1, RECOVERED), 3, 1, 6))
    counter.add(output((), 0, 0, 6, "cancelled"))
    message = counter.message()
    assert (message.rounds, message.undrafted_rounds) == (3, 1)
    assert list(message.drafted_per_position) == [2, 2, 1]
    assert list(message.accepted_per_position) == [2, 1, 0]
    assert message.acceptance_length == pytest.approx(1 + 3 / 2)


def test_origins_become_the_clients_words() -> None:
    message = response("r", output((2, RECOVERED, BONUS, PLAIN), 2, 2, 4))
    assert [(one.kind, one.draft_position) for one in message.origins] == [
        (pb.Origin.KIND_DRAFT, 2),
        (pb.Origin.KIND_RECOVERED, 0),
        (pb.Origin.KIND_BONUS, 0),
        (pb.Origin.KIND_PLAIN, 0),
    ]


async def test_a_stream_ends_with_the_output_that_finishes_it() -> None:
    stream = Stream("r", "v", buffer=10)
    stream.push(output((PLAIN,), 0, 0, 1))
    stream.push(output((PLAIN,), 0, 0, 2, "length"))
    assert stream.finished
    assert [len(one.token_ids) async for one in stream.outputs()] == [1, 1]
