"""What a client holds: the pieces of a stream, and a finished completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.protos import outrider_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with `role` and `content`."""

_FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}
_KINDS = {
    pb.Origin.KIND_PLAIN: "plain",
    pb.Origin.KIND_DRAFT: "draft",
    pb.Origin.KIND_RECOVERED: "recovered",
    pb.Origin.KIND_BONUS: "bonus",
}


@dataclass(frozen=True)
class Origin:
    """Where a token came from: "plain", "draft", "recovered" or "bonus".

    position: for a draft token its place in the round's chain, from 1; else 0.
    """

    kind: str
    position: int = 0


@dataclass(frozen=True)
class DraftStatistics:
    """How one request's drafts fared."""

    rounds: int
    undrafted_rounds: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    acceptance_length: float


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Chunk:
    """One response of a stream; the last one carries the finish reason and the counts.

    token_texts: where wanted, what text each token completes.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    seed: int | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    draft_statistics: DraftStatistics | None = None
    token_texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    seed: int
    finish_reason: str
    usage: Usage
    draft_statistics: DraftStatistics


@dataclass(frozen=True)
class Options:
    """How to generate; the neutral values sample from the target's own law.

    A field left at None is the service's choice.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    seed: int | None = None
    sample_index: int = 0
    want_token_texts: bool = False


def to_request(prompt: Prompt, options: Options, request_id: str) -> pb.GenerateRequest:
    """The message that asks for one stream."""
    request = pb.GenerateRequest(
        request_id=request_id,
        parameters=pb.SamplingParameters(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            logit_bias=dict(options.logit_bias),
        ),
        max_tokens=options.max_tokens,
        stop=list(options.stop),
        stop_token_ids=list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        num_speculative_tokens=options.num_speculative_tokens,
        seed=options.seed,
        sample_index=options.sample_index,
        want_token_texts=options.want_token_texts,
    )
    if options.allowed_token_ids is not None:
        request.parameters.allowed_token_ids.CopyFrom(
            pb.TokenIds(ids=list(options.allowed_token_ids))
        )
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if messages:
        if len(messages) != len(prompt):
            raise TypeError("a prompt is text, token ids or chat messages, not a mixture")
        request.chat.CopyFrom(
            pb.Chat(
                messages=[
                    pb.ChatMessage(role=item["role"], content=item["content"]) for item in messages
                ]
            )
        )
        return
    ids = [item for item in prompt if not isinstance(item, Mapping)]
    request.tokens.CopyFrom(pb.TokenIds(ids=ids))


def to_chunk(response: pb.GenerateResponse) -> Chunk:
    """A response as a client sees it."""
    statistics = response.draft_statistics
    return Chunk(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        origins=tuple(
            Origin(_KINDS.get(origin.kind, "plain"), origin.draft_position)
            for origin in response.origins
        ),
        seed=response.seed if response.HasField("seed") else None,
        finish_reason=_FINISH.get(response.finish_reason),
        usage=(
            Usage(response.usage.prompt_tokens, response.usage.completion_tokens)
            if response.HasField("usage")
            else None
        ),
        draft_statistics=(
            DraftStatistics(
                rounds=statistics.rounds,
                undrafted_rounds=statistics.undrafted_rounds,
                drafted_per_position=tuple(statistics.drafted_per_position),
                accepted_per_position=tuple(statistics.accepted_per_position),
                acceptance_length=statistics.acceptance_length,
            )
            if response.HasField("draft_statistics")
            else None
        ),
        token_texts=tuple(response.token_texts),
    )


def join(chunks: Iterable[Chunk]) -> Completion:
    """The completion that a whole stream amounts to."""
    held = list(chunks)
    if not held or held[-1].finish_reason is None:
        raise ValueError("the stream ended before its last response")
    last = held[-1]
    assert last.finish_reason is not None
    assert last.usage is not None and last.draft_statistics is not None
    return Completion(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in held),
        token_ids=tuple(token for chunk in held for token in chunk.token_ids),
        origins=tuple(origin for chunk in held for origin in chunk.origins),
        seed=next(chunk.seed for chunk in held if chunk.seed is not None),
        finish_reason=last.finish_reason,
        usage=last.usage,
        draft_statistics=last.draft_statistics,
    )
