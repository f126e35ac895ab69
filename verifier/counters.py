"""What an engine counts; snapshots of it are `EngineStats`."""

from __future__ import annotations

from outrider.protos.messages import VerdictBatch
from outrider.verifier.drafts import Matched
from outrider.verifier.types import EngineStats


class Counters:
    """Mutable totals of one engine; belongs to its thread."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = 0
        self.preemptions = 0
        self._undrafted = self._late = 0
        self._stale = self._malformed = self._lawless = 0
        self._draft_bytes = self._verdict_bytes = 0
        self._drafted: list[int] = []  # by position in the chain
        self._accepted: list[int] = []

    def collected(self, matched: Matched) -> None:
        """What arrived for a round."""
        self._stale += matched.stale
        self._malformed += matched.malformed
        self._lawless += matched.lawless
        self._late += matched.missing > 0
        self._draft_bytes += matched.num_bytes

    def verified(self, drafted: int, accepted: int) -> None:
        """One request's chain; a round without one leaves no trace in the rates."""
        for counts, number in ((self._drafted, drafted), (self._accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for place in range(number):
                counts[place] += 1

    def round(self, drafted: bool, sampled: bool) -> None:
        """The end of a round; one that only ran prompts is not called undrafted."""
        self.rounds += 1
        self._undrafted += sampled and not drafted

    def sent(self, verdicts: VerdictBatch) -> None:
        """The arrays that a round's verdicts carry."""
        self._verdict_bytes += sum(
            array.nbytes
            for array in (
                verdicts.request_ids,
                verdicts.epochs,
                verdicts.base_lengths,
                verdicts.num_accepted,
                verdicts.num_to_draft,
                verdicts.cu_tokens,
                verdicts.token_ids,
                verdicts.features,
            )
        )

    def snapshot(
        self, *, running: int, waiting: int, kv_blocks_used: int, kv_blocks_total: int
    ) -> EngineStats:
        """The totals so far, with gauges that the caller reads."""
        return EngineStats(
            rounds=self.rounds,
            undrafted_rounds=self._undrafted,
            late_rounds=self._late,
            tokens=self.tokens,
            drafted_per_position=tuple(self._drafted),
            accepted_per_position=tuple(self._accepted),
            draft_bytes=self._draft_bytes,
            verdict_bytes=self._verdict_bytes,
            stale_drafts=self._stale,
            malformed_drafts=self._malformed,
            lawless_drafts=self._lawless,
            preemptions=self.preemptions,
            running=running,
            waiting=waiting,
            kv_blocks_used=kv_blocks_used,
            kv_blocks_total=kv_blocks_total,
        )
