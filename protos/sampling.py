"""How the tokens of one request are to be sampled, and which values are usable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Bounds that keep float32 arithmetic on logits finite: a value beyond them would turn into 0 or
# infinity on its way to the sampler and change the meaning of the request.
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_LOGIT_SHIFT = 1e30
MAX_COUNT = 2**31 - 1


class InvalidField(ValueError):
    """A field of a request that cannot be used: its name, its value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}: {shown(value)} is not usable; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[InvalidField], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)


@dataclass(frozen=True)
class SamplingParameters:
    """The law of one request's tokens; the defaults sample the target's own distribution.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidField for the first value that cannot be sampled with."""
        _check_real(
            "temperature",
            self.temperature,
            lambda x: x == 0 or MIN_TEMPERATURE <= x <= MAX_TEMPERATURE,
            f"give 0 (greedy) or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
        top_k = self.top_k
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 0 <= top_k <= MAX_COUNT:
            raise InvalidField("top_k", top_k, "give a whole number >= 0 (0 = off)")
        _check_real(
            "top_p", self.top_p, lambda x: 0 < x <= 1, "give a number above 0 and up to 1 (1 = off)"
        )
        _check_real("min_p", self.min_p, lambda x: 0 <= x <= 1, "give a number from 0 (off) to 1")
        _check_real(
            "repetition_penalty",
            self.repetition_penalty,
            lambda x: 1 / MAX_TEMPERATURE <= x <= MAX_TEMPERATURE,
            f"give a number from {1 / MAX_TEMPERATURE:g} to {MAX_TEMPERATURE:g} (1 = off)",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check_real(
                name,
                getattr(self, name),
                lambda x: abs(x) <= MAX_TEMPERATURE,
                f"give a number from {-MAX_TEMPERATURE:g} to {MAX_TEMPERATURE:g} (0 = off)",
            )
        self._check_bias(vocab_size)
        self._check_allowed(vocab_size)

    def _check_bias(self, vocab_size: int | None) -> None:
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise InvalidField("logit_bias", entry, "give pairs of a token id and a number")
            token, bias = entry
            _check_token("logit_bias", token, vocab_size)
            _check_real(
                f"logit_bias[{token}]",
                bias,
                lambda x: abs(x) <= MAX_LOGIT_SHIFT,
                "give a finite number; allowed_token_ids excludes tokens altogether",
            )
        tokens = [token for token, _ in self.logit_bias]
        if len(set(tokens)) != len(tokens):
            raise InvalidField("logit_bias", tokens, "name each token id once")

    def _check_allowed(self, vocab_size: int | None) -> None:
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise InvalidField("allowed_token_ids", (), "name at least one token id, or leave it")
        for token in self.allowed_token_ids:
            _check_token("allowed_token_ids", token, vocab_size)
        if len(set(self.allowed_token_ids)) != len(self.allowed_token_ids):
            raise InvalidField(
                "allowed_token_ids", self.allowed_token_ids, "name each token id once"
            )


def shown(value: object) -> str:
    """The value as an error names it: at most one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_real(field: str, value: object, usable: Callable[[float], bool], remedy: str) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= MAX_LOGIT_SHIFT  # NaN, infinities and huge integers
        or not usable(value)
    ):
        raise InvalidField(field, value, remedy)


def _check_token(field: str, token: object, vocab_size: int | None) -> None:
    limit = MAX_COUNT if vocab_size is None else vocab_size
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
        raise InvalidField(field, token, f"give token ids from 0 to {limit - 1}")
