"""What a request must be to be accepted, and the record that it becomes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protos.messages import MAX_SAMPLE_INDEX
from outrider.protos.sampling import InvalidField
from outrider.verifier.detokenize import Detokenizer, decoder_of
from outrider.verifier.logits_processing import LogitsProcessor
from outrider.verifier.request import Request
from outrider.verifier.stops import OutputAssembler
from outrider.verifier.target import Target
from outrider.verifier.types import EngineConfig, GenerationRequest

MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True)
class Limits:
    """What an engine can serve. has_text: the target has a tokenizer."""

    vocab_size: int
    max_context: int
    has_text: bool


def context_limit(config: EngineConfig, max_positions: int) -> int:
    """Positions that a prompt and its answer may take together.

    Raises:
        InvalidField: more is asked for than the target has.
    """
    if config.max_context > max_positions:
        raise InvalidField(
            "max_context", config.max_context, f"the target has {max_positions} positions"
        )
    return config.max_context or max_positions


def check(request: GenerationRequest, limits: Limits, running: bool) -> None:
    """Raises InvalidField for the first field that cannot be served."""
    if running:
        raise InvalidField("request_id", request.request_id, "it is in flight; choose another")
    _check_ids("prompt", request.prompt_ids, limits)
    if not request.prompt_ids:
        raise InvalidField("prompt", "", "give at least one token")
    if len(request.prompt_ids) >= limits.max_context:
        raise InvalidField(
            "prompt",
            f"{len(request.prompt_ids)} tokens",
            f"give at most {limits.max_context - 1}, so that an answer fits the model's "
            f"{limits.max_context} positions",
        )
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", request.max_tokens, "give at least 1")
    request.parameters.validate(limits.vocab_size)
    if not 0 <= request.seed < 2**64:
        raise InvalidField("seed", request.seed, "give a number from 0 to 2**64 - 1")
    if not 0 <= request.sample_index <= MAX_SAMPLE_INDEX:
        raise InvalidField(
            "sample_index", request.sample_index, f"give a number from 0 to {MAX_SAMPLE_INDEX}"
        )
    drafts = request.num_speculative_tokens
    if drafts is not None and not 0 <= drafts <= MAX_SPECULATIVE_TOKENS:
        raise InvalidField(
            "num_speculative_tokens", drafts, f"give a number from 0 to {MAX_SPECULATIVE_TOKENS}"
        )
    if request.stop and not limits.has_text:
        raise InvalidField("stop", request.stop[0], "the target has no tokenizer; use stop ids")
    if "" in request.stop:
        raise InvalidField("stop", "", "a stop string needs at least one character")
    _check_ids("stop_token_ids", request.stop_token_ids, limits)
    _check_ids("output_ids", request.output_ids, limits)
    room = min(request.max_tokens, limits.max_context - len(request.prompt_ids))
    if len(request.output_ids) >= room:
        raise InvalidField(
            "output_ids", f"{len(request.output_ids)} tokens", f"the answer ends after {room}"
        )


def admit(
    request: GenerationRequest,
    number: int,
    target: Target,
    config: EngineConfig,
    max_context: int,
) -> Request:
    """The record of a request that was checked; its answer ends where the context does."""
    drafts = request.num_speculative_tokens
    processor = None
    if LogitsProcessor.needed(request.parameters):
        processor = LogitsProcessor(
            request.parameters,
            request.prompt_ids,
            request.output_ids,
            target.vocab_size,
            target.device,
        )
    detokenizer = None
    if target.tokenizer is not None:
        detokenizer = Detokenizer(
            decoder_of(target.tokenizer), (*request.prompt_ids, *request.output_ids)
        )
    return Request(
        number=number,
        source=request,
        num_speculative_tokens=config.num_speculative_tokens if drafts is None else drafts,
        max_output=min(request.max_tokens, max_context - len(request.prompt_ids)),
        stop_ids=frozenset(request.stop_token_ids)
        | (frozenset() if request.ignore_eos else target.eos_token_ids),
        assembler=OutputAssembler(detokenizer, request.stop),
        processor=processor,
        tokens=[*request.prompt_ids, *request.output_ids],
    )


def _check_ids(field: str, ids: tuple[int, ...], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidField(field, token, f"ids run from 0 to {limits.vocab_size - 1}")
