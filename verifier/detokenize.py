"""From tokens to text as it arrives, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character yet
CONTEXT = 5  # prompt tokens that are decoded along, because a word's space depends on what precedes

Decode = Callable[[Sequence[int]], str]


def decoder_of(tokenizer: Any) -> Decode:
    """Decoding as an answer is shown: special tokens are no text."""

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


class Detokenizer:
    """The text of one answer, token by token.

    Decoded are only the tokens of the last complete piece and those behind it; the difference is
    what is new.
    """

    def __init__(self, decode: Decode, context_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context_ids[-CONTEXT:])
        self._read = len(self._ids)  # tokens whose text was given out
        self._before = decode(self._ids) if self._ids else ""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._before) or text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._before) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return new

    def flush(self) -> str:
        """What is left at the end of an answer; bytes that never became a character are not."""
        text = self._decode(self._ids)
        left = text[len(self._before) :].rstrip(REPLACEMENT)
        self._ids, self._read, self._before = [], 0, ""
        return left
