"""The one mutable record of a request; owned by the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier.logits_processing import LogitsProcessor
from outrider.verifier.stops import Emission, OutputAssembler
from outrider.verifier.types import GenerationRequest, TokenOutput


@dataclass(eq=False)
class Request:
    """A request in flight.

    number: its id towards drafters, unique in an engine. tokens: prompt and output, all
    committed. computed: positions whose keys and values are in the cache. blocks: where.
    epoch counts its lives: a preempted request loses its cache and begins the next one.
    asked: drafts that the last verdict asked for. opened: drafters know this life of it.
    """

    number: int
    source: GenerationRequest
    num_speculative_tokens: int
    max_output: int
    stop_ids: frozenset[int]
    assembler: OutputAssembler
    processor: LogitsProcessor | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    epoch: int = 0
    asked: int = 0
    opened: bool = False
    finish_reason: str | None = None

    @property
    def committed(self) -> int:
        """L, the length of prompt and output."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens generated, those of earlier lives included."""
        return len(self.tokens) - len(self.source.prompt_ids)

    @property
    def pending(self) -> int:
        """Known tokens that were not run yet; 1 while decoding."""
        return self.committed - self.computed

    @property
    def draft_room(self) -> int:
        """Drafts that are of use next: as many as asked for, less at the end of the answer."""
        return max(0, min(self.num_speculative_tokens, self.max_output - self.num_output - 1))

    def commit(self, token_id: int, origin: int) -> None:
        """Adds a verified token and says whether the answer ends with it; a stop wins."""
        self.tokens.append(token_id)
        if self.processor is not None:
            self.processor.commit((token_id,))
        if self.assembler.push(token_id, origin) or token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_output >= self.max_output:
            self.finish_reason = "length"

    def output(self, drafted: int, accepted: int, error: str | None = None) -> TokenOutput:
        """What is certain of the answer now."""
        final = self.finish_reason is not None
        if final and self.assembler.finish():
            self.finish_reason = "stop" if self.finish_reason == "length" else self.finish_reason
        emission: Emission = self.assembler.take(final)
        return TokenOutput(
            request_id=self.source.request_id,
            token_ids=emission.token_ids,
            origins=emission.origins,
            text=emission.text,
            finish_reason=self.finish_reason,
            error=error,
            drafted=drafted,
            accepted=accepted,
            prompt_tokens=len(self.source.prompt_ids),
            completion_tokens=len(self.source.output_ids) + self.assembler.given,
        )

    def begin_again(self) -> None:
        """Forgets everything that can be computed again; the blocks were taken back."""
        assert not self.blocks
        self.computed = 0
        self.asked = 0
        self.opened = False
        self.epoch += 1
