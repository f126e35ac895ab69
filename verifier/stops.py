"""What of an answer may be given out: text up to a stop string, and the tokens that belong to it.

Text that may turn out to be the beginning of a stop string waits, and so do its tokens, so that
nothing which was given out is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier.detokenize import Detokenizer


@dataclass(frozen=True)
class Emission:
    """Tokens with their origins, and text, that are final."""

    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class _Held:
    token_id: int
    origin: int
    start: int  # characters of the answer before this token's text


class OutputAssembler:
    """Collects the tokens of one answer and gives out what is certain."""

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in stop), default=0)
        self._held: list[_Held] = []
        self._text = ""  # not given out
        self._given = 0  # characters given out
        self._count = 0  # tokens given out
        self._stopped = False

    @property
    def given(self) -> int:
        """Tokens given out so far."""
        return self._count

    def push(self, token_id: int, origin: int) -> bool:
        """Adds a token; True if it completes a stop string, which ends the answer before it."""
        self._held.append(_Held(token_id, origin, self._given + len(self._text)))
        return self._detokenizer is not None and self._add(self._detokenizer.push(token_id))

    def finish(self) -> bool:
        """Adds the text that was still incomplete; True if it completes a stop string."""
        if self._detokenizer is None or self._stopped:
            return False
        return self._add(self._detokenizer.flush())

    def take(self, final: bool) -> Emission:
        """What is certain now; everything, if the answer is over."""
        ready = len(self._text)
        held: list[_Held] = []
        if self._stop and not final:
            ready -= self._possible_start()
            held = [token for token in self._held if token.start >= self._given + ready]
        given = self._held[: len(self._held) - len(held)]
        text, self._text, self._held = self._text[:ready], self._text[ready:], held
        self._given += len(text)
        self._count += len(given)
        return Emission(
            tuple(token.token_id for token in given), tuple(token.origin for token in given), text
        )

    def _add(self, text: str) -> bool:
        if not text:
            return False
        begin = max(0, len(self._text) - self._longest + 1)
        self._text += text
        # Of several, the one that ends first: the same however the text is cut into tokens.
        found = [
            (at + len(stop), at) for stop in self._stop if (at := self._text.find(stop, begin)) >= 0
        ]
        if not found:
            return False
        self._stopped = True
        _, cut = min(found)
        self._text = self._text[:cut]
        self._held = [token for token in self._held if token.start < self._given + cut]
        return True

    def _possible_start(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0
