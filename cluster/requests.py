"""From a client's message to an engine's request: every field checked, none passed on trust."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.protos import outrider_pb2 as pb
from outrider.protos.sampling import InvalidField, SamplingParameters
from outrider.verifier.detokenize import Detokenizer
from outrider.verifier.types import GenerationRequest

ROLES = ("system", "user", "assistant")
MAX_REQUEST_ID = 128
MAX_SAMPLE_INDEX = 2**24 - 1
MAX_SEED = 2**63 - 1


class PromptEncoder(Protocol):
    """Turns text into the target's token ids, in a worker thread, and tokens into text."""

    def encode(self, text: str) -> list[int]:
        """Plain text, with the special tokens that the model wants in front."""
        ...

    def render(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """(role, content) pairs through the chat template, ready for the answer."""
        ...

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """The text that each token of an answer completes."""
        ...


@dataclass(frozen=True)
class Limits:
    """What requests are measured against. max_context: prompt and answer together."""

    vocab_size: int
    max_context: int
    max_stop_strings: int


def request_id_of(request: pb.GenerateRequest) -> str:
    """The client's id, or a fresh one."""
    if not request.request_id:
        return secrets.token_hex(8)
    if len(request.request_id) > MAX_REQUEST_ID or not request.request_id.isprintable():
        raise InvalidField(
            "request_id",
            request.request_id[:40],
            f"give at most {MAX_REQUEST_ID} printable characters",
        )
    return request.request_id


def check(request: pb.GenerateRequest, limits: Limits) -> SamplingParameters:
    """Refuses what can be refused before the prompt is tokenised."""
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise InvalidField(
            "max_tokens", request.max_tokens, "give at least 1, or leave it out for no limit"
        )
    if request.HasField("num_speculative_tokens") and request.num_speculative_tokens < 0:
        raise InvalidField(
            "num_speculative_tokens",
            request.num_speculative_tokens,
            "give at least 0, or leave it out for the service's number",
        )
    if request.resume_from:
        raise InvalidField("resume_from", request.resume_from, "give 0: start from the prompt")
    if request.HasField("seed") and request.seed > MAX_SEED:
        raise InvalidField("seed", request.seed, f"give at most {MAX_SEED}")
    if request.sample_index > MAX_SAMPLE_INDEX:
        raise InvalidField("sample_index", request.sample_index, f"give at most {MAX_SAMPLE_INDEX}")
    if len(request.stop) > limits.max_stop_strings:
        raise InvalidField(
            "stop", len(request.stop), f"give at most {limits.max_stop_strings} strings"
        )
    if any(not text for text in request.stop):
        raise InvalidField("stop", "", "give no empty string; leave the list empty for none")
    parameters = _parameters(request.parameters)
    parameters.validate(limits.vocab_size)
    return parameters


def prompt_ids(
    request: pb.GenerateRequest, encoder: PromptEncoder | None, limits: Limits
) -> tuple[int, ...]:
    """The prompt as token ids of the target; may tokenise, so call it in a thread."""
    kind = request.WhichOneof("prompt")
    if kind == "tokens":
        ids = list(request.tokens.ids)
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise InvalidField("tokens", token, f"give ids from 0 to {limits.vocab_size - 1}")
    elif kind == "text" and request.text:
        ids = _encoder(encoder, kind).encode(request.text)
    elif kind == "chat" and request.chat.messages:
        for message in request.chat.messages:
            if message.role not in ROLES:
                raise InvalidField("chat.role", message.role, f"choose one of {', '.join(ROLES)}")
        ids = _encoder(encoder, kind).render(
            [(message.role, message.content) for message in request.chat.messages]
        )
    else:
        ids = []
    if not ids:
        raise InvalidField("prompt", "empty", "give text, token ids or chat messages")
    if len(ids) >= limits.max_context:
        raise InvalidField(
            "prompt",
            f"{len(ids)} tokens",
            f"give at most {limits.max_context - 1}: the context holds {limits.max_context}",
        )
    return tuple(ids)


def build(
    request: pb.GenerateRequest,
    engine_id: str,
    parameters: SamplingParameters,
    ids: tuple[int, ...],
    limits: Limits,
) -> GenerationRequest:
    """The engine's request; draws the seed if the client chose none."""
    room = limits.max_context - len(ids)
    max_tokens = min(request.max_tokens, room) if request.HasField("max_tokens") else room
    return GenerationRequest(
        request_id=engine_id,
        prompt_ids=ids,
        parameters=parameters,
        max_tokens=max_tokens,
        seed=request.seed if request.HasField("seed") else secrets.randbits(63),
        sample_index=request.sample_index,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        num_speculative_tokens=(
            request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
        ),
    )


def _encoder(encoder: PromptEncoder | None, kind: str) -> PromptEncoder:
    if encoder is None:
        raise InvalidField("prompt", kind, "send token ids: this target has no tokenizer")
    return encoder


def _parameters(message: pb.SamplingParameters) -> SamplingParameters:
    given = {
        name: getattr(message, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        )
        if message.HasField(name)
    }
    return SamplingParameters(
        **given,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=(
            tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None
        ),
    )
