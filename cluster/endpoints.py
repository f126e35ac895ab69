"""What a drafter actor adds to a drafter: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from outrider.cluster.links import Drafter
from outrider.protos.codec import decode, encode, largest_draft_batch
from outrider.protos.messages import (
    DraftBatch,
    MalformedMessage,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)

Kind = TypeVar("Kind")


class DraftEndpoint:
    """A drafter that speaks bytes.

    An answer has the size that the largest one to the same verdict would have: were it smaller
    for likely tokens, it would arrive sooner, and a deadline would favour them.
    """

    def __init__(self, drafter: Drafter, max_support: int) -> None:
        self._drafter = drafter
        self._max_support = max_support
        self._sampled: set[int] = set()  # requests whose drafts come with their law

    def attach(self) -> bytes:
        """The head's FeatureSpec."""
        return encode(self._drafter.feature_spec())

    def round(
        self, opens: Sequence[bytes], verdict: bytes | None, closes: Sequence[bytes]
    ) -> bytes:
        """Forgets, learns of, and drafts for requests; empty where no verdict came.

        Raises:
            MalformedMessage: a message of another kind than its place asks for.
        """
        for data in closes:
            close = _expect(data, RequestClose)
            self._drafter.close(close)
            self._sampled.discard(close.request_id)
        for data in opens:
            request = _expect(data, RequestOpen)
            self._drafter.open(request)
            if not request.parameters.greedy:
                self._sampled.add(request.request_id)
        if verdict is None:
            return b""
        verdicts = _expect(verdict, VerdictBatch)
        batch = self._drafter.propose(verdicts)
        return encode(batch, pad_to=self._full_size(verdicts, batch))

    def _full_size(self, verdicts: VerdictBatch, batch: DraftBatch) -> int:
        counts = verdicts.num_to_draft.tolist()
        ids = verdicts.request_ids.tolist()
        with_law = sum(
            count
            for request_id, count in zip(ids, counts, strict=True)
            if request_id in self._sampled
        )
        id_bytes: int = batch.support_ids.itemsize
        entry_bytes: int = id_bytes + batch.support_weights.itemsize
        asked = sum(count > 0 for count in counts)
        without_law = largest_draft_batch(
            batch.service, batch.sender, asked, sum(counts), 0, id_bytes
        )
        size: int = without_law + entry_bytes * self._max_support * with_law
        return size


def _expect(data: bytes, kind: type[Kind]) -> Kind:
    message = decode(data)
    if not isinstance(message, kind):
        raise MalformedMessage("message", type(message).__name__, f"send a {kind.__name__} here")
    return message
