"""What a verifier takes and gives, and how it is set up; needs neither torch, ray nor grpc."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protos.messages import METHODS
from outrider.protos.sampling import InvalidField, SamplingParameters

PLAIN, RECOVERED, BONUS = 0, -1, -2  # origins of tokens that were not drafted


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate.

    num_speculative_tokens: None takes the engine's number, 0 decodes plainly.
    output_ids: tokens generated in an earlier life; generation goes on behind them, and
    max_tokens counts them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    parameters: SamplingParameters
    max_tokens: int
    seed: int
    sample_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """What one round brought one request.

    origins: per token PLAIN (nothing was drafted this round), the accepted draft's place in its
    chain from 1, RECOVERED or BONUS. text: what became readable; it may lag behind the tokens.
    drafted, accepted: this round's counts. The token counts are totals so far.
    """

    request_id: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    text: str
    finish_reason: str | None  # "stop", "length", "cancelled" or "error"
    error: str | None
    drafted: int
    accepted: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine's counters.

    rounds: forward passes. undrafted_rounds: those of them that decoded without any draft.
    late_rounds: those in which a wanted draft had not come by the deadline. Per position:
    index 0 is a chain's first token. stale, malformed and lawless drafts are chains that were
    dropped: for another state than the committed one, unsound, or sampled without their law.
    """

    rounds: int
    undrafted_rounds: int
    late_rounds: int
    tokens: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    draft_bytes: int
    verdict_bytes: int
    stale_drafts: int
    malformed_drafts: int
    lawless_drafts: int
    preemptions: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


@dataclass(frozen=True)
class EngineConfig:
    """How an engine schedules and drafts.

    num_speculative_tokens: K for requests that name none. method: the verification rule.
    max_context: positions that the target is ever given; 0 takes the model's limit.
    kv_bytes: memory for the KV cache, block_size tokens a block. prefill_chunk: prompt tokens in
    one round, all requests together. max_batch: requests running at once; max_waiting: requests
    queued behind them. draft_deadline_s: how long a round waits for drafts.
    """

    num_speculative_tokens: int = 2
    method: str = "rejection"
    max_context: int = 0
    kv_bytes: int = 512 * 2**20
    block_size: int = 16
    prefill_chunk: int = 256
    max_batch: int = 64
    max_waiting: int = 256
    draft_deadline_s: float = 0.25
    service: str = "default"
    sender: str = "verifier"

    def __post_init__(self) -> None:
        for name, least in (
            ("num_speculative_tokens", 0),
            ("max_context", 0),
            ("kv_bytes", 1),
            ("block_size", 1),
            ("prefill_chunk", 1),
            ("max_batch", 1),
            ("max_waiting", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise InvalidField(name, value, f"give at least {least}")
        if self.method not in METHODS:
            raise InvalidField("method", self.method, f"choose one of {', '.join(METHODS)}")
        if not self.draft_deadline_s >= 0:
            raise InvalidField("draft_deadline_s", self.draft_deadline_s, "give a number >= 0")


@dataclass(frozen=True)
class TargetConfig:
    """Which model to serve, and how.

    path: a folder with config.json and safetensors, a .gguf file, or a hub id.
    vocab_size: real words of the vocabulary where the model's rows are padded beyond them;
    0 takes the tokenizer's length. compile: "off" or "warmup", which compiles one graph a
    bucket of packed tokens before the verifier is ready. threads: compute threads on a CPU;
    0 leaves torch's own choice.
    """

    path: str
    dtype: str = "bfloat16"
    vocab_size: int = 0
    compile: str = "off"
    buckets: tuple[int, ...] = (1, 4, 8, 32)
    threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise InvalidField("dtype", self.dtype, "choose bfloat16 or float32")
        if self.compile not in ("off", "warmup"):
            raise InvalidField("compile", self.compile, "choose off or warmup")
        if not 1 <= len(self.buckets) <= 4 or list(self.buckets) != sorted(set(self.buckets)):
            raise InvalidField("buckets", self.buckets, "give one to four rising token counts")
        if self.buckets[0] < 1:
            raise InvalidField("buckets", self.buckets, "give token counts of at least 1")
        if self.threads < 0:
            raise InvalidField("threads", self.threads, "give at least 0")


@dataclass(frozen=True)
class Refusal:
    """Why a request was not taken. retry: the same request may be taken later."""

    message: str
    retry: bool


class QueueFull(Exception):
    """No room for another waiting request; try again later."""
