"""The seam to whatever drafts: one small protocol, and the link that drafts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    Int32,
    Int64,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)


@dataclass(frozen=True, eq=False)
class Batch:
    """The requests of a round that asked for drafts, each with its committed state.

    A draft is of use only if the first four equal its own.
    """

    request_ids: Int64  # [B]
    epochs: Int32  # [B]
    base_lengths: Int32  # [B], the committed length
    last_token_ids: Int32  # [B]
    num_draft_tokens: Int32  # [B], how many were asked for; at least 1


class DraftLink(Protocol):
    """Where drafts come from. Nothing here raises for a dead, slow or lying peer."""

    def open(self, request: RequestOpen) -> None:
        """A request begins, or begins again under a new epoch."""
        ...

    def close(self, request: RequestClose) -> None:
        """A request, in one of its lives, is over."""
        ...

    def send(self, verdicts: VerdictBatch) -> None:
        """Passes a round's verdicts on; never blocks."""
        ...

    def collect(self, wanted: Batch, deadline: float) -> DraftBatch:
        """The drafts that are there, at the latest at `deadline` of `time.monotonic()`.

        Returns as soon as every wanted draft is there or known not to come.
        """
        ...

    def take_feature_spec(self) -> FeatureSpec | None:
        """A spec that was not taken yet: at attach, and when the head changes."""
        ...

    def close_link(self) -> None:
        """The verifier stops; releases what the link holds."""
        ...


class NullLink:
    """No drafter: every request decodes plainly."""

    def open(self, request: RequestOpen) -> None:
        """See DraftLink."""

    def close(self, request: RequestClose) -> None:
        """See DraftLink."""

    def send(self, verdicts: VerdictBatch) -> None:
        """See DraftLink."""

    def collect(self, wanted: Batch, deadline: float) -> DraftBatch:
        """See DraftLink."""
        return no_drafts()

    def take_feature_spec(self) -> FeatureSpec | None:
        """See DraftLink."""
        return None

    def close_link(self) -> None:
        """See DraftLink."""


def no_drafts(service: str = "", sender: str = "") -> DraftBatch:
    """A batch without entries."""
    none = np.zeros(0, dtype=np.int32)
    zero = np.zeros(1, dtype=np.int32)
    return DraftBatch(
        service=service,
        sender=sender,
        round=0,
        target_version=0,
        head_version=0,
        deterministic=True,
        request_ids=np.zeros(0, dtype=np.int64),
        epochs=none,
        base_lengths=none,
        last_token_ids=none,
        cu_num_draft_tokens=zero,
        token_ids=none,
        parents=none,
        cu_support=zero,
        support_ids=none,
        support_weights=np.zeros(0, dtype=np.float16),
    )
