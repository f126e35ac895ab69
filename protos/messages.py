"""The array messages between verifiers and drafters, and the proof that one is sound.

Axes: B requests of a verdict, S its tokens, H features; E entries of a draft batch, N its draft
tokens, M the support entries of all of them; P prompt and O output tokens of a request.
Every array is C-contiguous numpy in native byte order. `validate()` looks at every element, in a
fixed number of array operations, and raises MalformedMessage for the first thing that it cannot
prove sound, so that whoever holds a validated message can index with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.protos.sampling import InvalidField, SamplingParameters, shown

METHODS = ("rejection", "block", "coupled")
WEIGHT_UNIT = 2.0**-24  # every finite float16 is a multiple of it
MAX_SAMPLE_INDEX = 2**24 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_NAME_LENGTH = 255

Array: TypeAlias = npt.NDArray[Any]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]


class MalformedMessage(ValueError):
    """A message that must not be used: the field, its value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}: {shown(value)} is not usable; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[MalformedMessage], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)


@dataclass(frozen=True, eq=False)
class RequestOpen:
    """A request begins, or begins again, on a drafter."""

    request_id: int
    epoch: int  # which life of the request
    prompt_ids: Int32  # [P]
    output_ids: Int32  # [O], what was committed before this life
    seed: int  # 64 bits, unsigned
    sample_index: int
    parameters: SamplingParameters
    method: str  # one of METHODS

    def validate(self, vocab_size: int | None = None) -> None:
        _check_scalar("request_id", self.request_id, -(2**63), 2**63 - 1)
        _check_scalar("epoch", self.epoch, 0, MAX_TOKEN_ID)
        _check_scalar("seed", self.seed, 0, 2**64 - 1)
        _check_scalar("sample_index", self.sample_index, 0, MAX_SAMPLE_INDEX)
        _check_choice("method", self.method, METHODS)
        _check_array("prompt_ids", self.prompt_ids, (np.int32,), (None,))
        _check_array("output_ids", self.output_ids, (np.int32,), (None,))
        if not len(self.prompt_ids):
            raise MalformedMessage("prompt_ids", "[]", "a request has at least one prompt token")
        _check_token_ids("prompt_ids", self.prompt_ids, vocab_size)
        _check_token_ids("output_ids", self.output_ids, vocab_size)
        try:
            self.parameters.validate(vocab_size)
        except InvalidField as error:
            raise MalformedMessage(
                f"parameters.{error.field}", error.value, error.remedy
            ) from error


@dataclass(frozen=True)
class RequestClose:
    """A request, in one of its lives, is over on a drafter."""

    request_id: int
    epoch: int

    def validate(self) -> None:
        _check_scalar("request_id", self.request_id, -(2**63), 2**63 - 1)
        _check_scalar("epoch", self.epoch, 0, MAX_TOKEN_ID)


@dataclass(frozen=True, eq=False)
class FeatureSpec:
    """What a head wants to be told about each position.

    `layers` counts as transformers' `hidden_states` does: 0 is the embedding, i the output of
    layer i. The row of a position is the concatenation of those states, each normalised with its
    row of `norm` where there is one, times `projection` transposed where there is one.
    """

    layers: tuple[int, ...]
    hidden_size: int  # width of one hidden state of the target
    head_version: int
    norm: Array | None  # float32 or uint16 (bfloat16 view) [hidden_size] or [layers, hidden_size]
    projection: npt.NDArray[np.uint16] | None  # bfloat16 view [H, layers * hidden_size]

    @property
    def width(self) -> int:
        """H, the width of a row of features."""
        if self.projection is not None:
            return int(self.projection.shape[0])
        return len(self.layers) * self.hidden_size

    def validate(self, num_layers: int | None = None, hidden_size: int | None = None) -> None:
        last = MAX_TOKEN_ID if num_layers is None else num_layers
        if not isinstance(self.layers, tuple) or not self.layers:
            raise MalformedMessage("layers", self.layers, "name at least one layer")
        for layer in self.layers:
            _check_scalar("layers", layer, 0, last)
        if len(set(self.layers)) != len(self.layers):
            raise MalformedMessage("layers", self.layers, "name each layer once")
        _check_scalar("hidden_size", self.hidden_size, 1, MAX_TOKEN_ID)
        if hidden_size is not None and self.hidden_size != hidden_size:
            raise MalformedMessage(
                "hidden_size",
                self.hidden_size,
                f"the target's is {hidden_size}; use a head made for it",
            )
        _check_scalar("head_version", self.head_version, 0, 2**63 - 1)
        if self.norm is not None:
            rows: tuple[int, ...] = (len(self.layers),) if np.ndim(self.norm) == 2 else ()
            _check_array("norm", self.norm, (np.float32, np.uint16), (*rows, self.hidden_size))
        if self.projection is not None:
            inputs = len(self.layers) * self.hidden_size
            _check_array("projection", self.projection, (np.uint16,), (None, inputs))
            if not len(self.projection):
                raise MalformedMessage("projection", "[]", "give at least one output row")


@dataclass(frozen=True, eq=False)
class VerdictBatch:
    """What a verifier tells a drafter after a round, a prefill chunk or a failover.

    Row i of a request holds the features of position base + i and the id of the (always known)
    token at base + i + 1, so its committed length becomes base + rows + 1. Features are not
    checked for finite values: a request with a broken row must not take its neighbours along.
    """

    service: str
    sender: str
    round: int
    target_version: int
    head_version: int
    request_ids: Int64  # [B]
    epochs: Int32  # [B]
    base_lengths: Int32  # [B]
    num_accepted: Int32  # [B]
    num_to_draft: Int32  # [B]; 0: only catch up
    cu_tokens: Int32  # [B+1]
    token_ids: Int32  # [S]
    features: Array  # [S, H] float32, or uint16 viewing bfloat16

    FEATURE_TYPES: ClassVar = (np.float32, np.uint16)

    def validate(self, vocab_size: int | None = None, feature_width: int | None = None) -> None:
        _check_header(self)
        requests = _length("request_ids", self.request_ids, np.int64)
        for name in ("epochs", "base_lengths", "num_accepted", "num_to_draft"):
            values: Int32 = getattr(self, name)
            _check_array(name, values, (np.int32,), (requests,))
            _check_elements(name, values, values < 0, "give numbers >= 0")
        tokens = _length("token_ids", self.token_ids, np.int32)
        rows = _check_offsets("cu_tokens", self.cu_tokens, requests, tokens)
        _check_token_ids("token_ids", self.token_ids, vocab_size)
        _check_array("features", self.features, self.FEATURE_TYPES, (tokens, feature_width))
        _check_elements(
            "num_accepted",
            self.num_accepted,
            self.num_accepted > np.maximum(rows - 1, 0),
            "a request's rows are its accepted tokens and one more",
        )
        _check_elements(
            "base_lengths",
            self.base_lengths,
            self.base_lengths.astype(np.int64) + rows >= MAX_TOKEN_ID,
            "lengths must stay below 2**31",
        )
        if len(np.unique(self.request_ids)) != requests:
            raise MalformedMessage(
                "request_ids", self.request_ids.tolist(), "name each request once in a batch"
            )


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """What a drafter proposes: chains of tokens and, for sampled ones, the law of each.

    A chain is used only if its request id, epoch, base length and last token all equal the
    committed state. A token's law is its slice of the support, weights over their own sum, and
    the token was drawn from exactly that. `deterministic` says that tokens were chosen without
    randomness; otherwise an empty slice means that the law is missing.
    """

    service: str
    sender: str
    round: int
    target_version: int
    head_version: int
    deterministic: bool
    request_ids: Int64  # [E], several entries a request if the drafter likes
    epochs: Int32  # [E]
    base_lengths: Int32  # [E]
    last_token_ids: Int32  # [E]
    cu_num_draft_tokens: Int32  # [E+1]
    token_ids: Int32  # [N]
    parents: Int32  # [N], index in the entry's chain of the token before; -1 for its first
    cu_support: Int32  # [N+1]
    support_ids: Array  # [M] uint16 or int32
    support_weights: npt.NDArray[np.float16]  # [M]

    ID_TYPES: ClassVar = (np.uint16, np.int32)

    def validate(self, vocab_size: int | None = None) -> None:
        _check_header(self)
        if not isinstance(self.deterministic, bool):
            raise MalformedMessage("deterministic", self.deterministic, "give True or False")
        entries = _length("request_ids", self.request_ids, np.int64)
        for name in ("epochs", "base_lengths", "last_token_ids"):
            values: Int32 = getattr(self, name)
            _check_array(name, values, (np.int32,), (entries,))
            _check_elements(name, values, values < 0, "give numbers >= 0")
        _check_token_ids("last_token_ids", self.last_token_ids, vocab_size)
        tokens = _length("token_ids", self.token_ids, np.int32)
        chain_lengths = _check_offsets(
            "cu_num_draft_tokens", self.cu_num_draft_tokens, entries, tokens
        )
        _check_token_ids("token_ids", self.token_ids, vocab_size)
        _check_array("parents", self.parents, (np.int32,), (tokens,))
        starts = np.repeat(self.cu_num_draft_tokens[:-1], chain_lengths)
        previous = np.arange(tokens, dtype=np.int32) - starts - 1
        _check_elements(
            "parents",
            self.parents,
            self.parents != previous,
            "a chain counts -1, 0, 1, ...; trees are not served",
        )
        self._check_support(tokens, vocab_size)

    def _check_support(self, tokens: int, vocab_size: int | None) -> None:
        _check_array("support_ids", self.support_ids, self.ID_TYPES, (None,))
        size = len(self.support_ids)
        _check_array("support_weights", self.support_weights, (np.float16,), (size,))
        slices = _check_offsets("cu_support", self.cu_support, tokens, size)
        if size == 0:
            return
        if self.deterministic:
            raise MalformedMessage(
                "cu_support", size, "a deterministic batch has no support; leave it empty"
            )
        _check_token_ids("support_ids", self.support_ids, vocab_size)
        bits = self.support_weights.view(np.uint16)
        _check_elements(
            "support_weights",
            self.support_weights,
            bits >= 0x7C00,  # infinity, NaN, or the sign bit
            "give finite weights >= 0",
        )
        units = (self.support_weights.astype(np.float64) / WEIGHT_UNIT).astype(np.int64)
        sums = _slice_sums(units, self.cu_support)
        _check_elements(
            "support_weights, summed per token",
            sums * WEIGHT_UNIT,
            (slices > 0) & ((sums <= 0) | (sums * WEIGHT_UNIT > 1)),
            "a token's weights sum to more than 0 and at most 1",
        )
        owners = np.repeat(np.arange(tokens, dtype=np.int64), slices)
        keys = np.sort((owners << 32) | self.support_ids.astype(np.int64))
        repeated = keys[1:] == keys[:-1]
        _check_elements(
            "support_ids", keys[1:] & 0xFFFFFFFF, repeated, "name each id once in a token's support"
        )
        own = (self.support_ids == self.token_ids[owners]) & (bits > 0)
        found = _slice_sums(own.astype(np.int64), self.cu_support)
        _check_elements(
            "token_ids",
            self.token_ids,
            (slices > 0) & (found == 0),
            "a drafted token has weight in its own support",
        )


Message: TypeAlias = RequestOpen | RequestClose | FeatureSpec | VerdictBatch | DraftBatch


def _check_header(message: VerdictBatch | DraftBatch) -> None:
    for name in ("service", "sender"):
        value = getattr(message, name)
        if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH or not value.isprintable():
            remedy = f"give at most {MAX_NAME_LENGTH} printable characters"
            raise MalformedMessage(name, value, remedy)
    for name in ("round", "target_version", "head_version"):
        _check_scalar(name, getattr(message, name), 0, 2**63 - 1)


def _check_scalar(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise MalformedMessage(field, value, f"give a whole number from {low} to {high}")


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise MalformedMessage(field, value, f"choose one of {', '.join(choices)}")


def _check_array(
    field: str, value: object, dtypes: Sequence[type], shape: tuple[int | None, ...]
) -> None:
    """The type, the layout and the shape; None in the shape matches any size."""
    if not isinstance(value, np.ndarray):
        raise MalformedMessage(field, type(value).__name__, "give a numpy array")
    if value.dtype not in dtypes or not value.dtype.isnative:
        names = " or ".join(np.dtype(t).name for t in dtypes)
        raise MalformedMessage(field, str(value.dtype), f"give {names} in native byte order")
    if not value.flags.c_contiguous or not value.flags.aligned:
        raise MalformedMessage(field, "a strided array", "pass it through numpy.ascontiguousarray")
    fits = len(shape) == value.ndim and all(
        want is None or want == have for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise MalformedMessage(f"{field}.shape", value.shape, f"the shape here is ({wanted})")


def _length(field: str, value: object, dtype: type) -> int:
    _check_array(field, value, (dtype,), (None,))
    assert isinstance(value, np.ndarray)
    return len(value)


def _check_elements(field: str, values: Array, wrong: npt.NDArray[np.bool_], remedy: str) -> None:
    if wrong.any():
        index = int(wrong.argmax())
        raise MalformedMessage(f"{field}[{index}]", values[index].item(), remedy)


def _check_token_ids(field: str, values: Array, vocab_size: int | None) -> None:
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    _check_elements(
        field, values, (values < 0) | (values >= limit), f"give token ids from 0 to {limit - 1}"
    )


def _check_offsets(field: str, values: object, parts: int, total: int) -> Int32:
    """Running sums that start at 0, never fall, and end at `total`. Returns each part's size."""
    _check_array(field, values, (np.int32,), (parts + 1,))
    assert isinstance(values, np.ndarray)
    if values[0] != 0 or values[-1] != total:
        raise MalformedMessage(
            field, values[[0, -1]].tolist(), f"the first is 0 and the last is {total}"
        )
    _check_elements(field, values[1:], values[1:] < values[:-1], "running sums never fall")
    return np.diff(values)


def _slice_sums(values: Int64, offsets: Int32) -> Int64:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]
