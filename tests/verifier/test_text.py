"""Text as it is given out: whole characters, nothing beyond a stop string, tokens in step."""

from __future__ import annotations

import pytest

from outrider.verifier.detokenize import Detokenizer
from outrider.verifier.stops import OutputAssembler

Piece = bytes


def decoder(pieces: list[Piece]):
    """Decodes token i as bytes pieces[i], as byte-level tokenizers do."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


def stream(pieces: list[Piece], stop: tuple[str, ...] = (), block: int = 1):
    """Pushes all tokens, `block` at a time; emissions, and whether a stop string ended it."""
    assembler = OutputAssembler(Detokenizer(decoder(pieces)), stop)
    emissions, stopped = [], False
    for start in range(0, len(pieces), block):
        for token in range(start, min(start + block, len(pieces))):
            stopped = assembler.push(token, token)
            if stopped:
                break
        if stopped:
            break
        emissions.append(assembler.take(False))
    stopped = assembler.finish() or stopped
    emissions.append(assembler.take(True))
    ids = tuple(i for e in emissions for i in e.token_ids)
    assert ids == tuple(i for e in emissions for i in e.origins)
    assert assembler.given == len(ids)
    return [e.text for e in emissions], ids, stopped


@pytest.mark.parametrize("block", [1, 2, 3])
def test_characters_split_over_tokens_come_whole(block: int) -> None:
    text = "naïve 🙂 done"
    pieces = [bytes([b]) for b in text.encode()]
    texts, ids, _ = stream(pieces, block=block)
    assert "".join(texts) == text
    assert all("\ufffd" not in part for part in texts)
    assert len(ids) == len(pieces)


def test_half_a_character_at_the_end_is_not_shown() -> None:
    texts, ids, _ = stream([b"ok ", "🙂".encode()[:2]])
    assert "".join(texts) == "ok "
    assert len(ids) == 2


@pytest.mark.parametrize("block", [1, 2, 4])
def test_d3_stop_string_over_two_tokens_cuts_text_and_tokens(block: int) -> None:
    texts, ids, stopped = stream([b"one ", b"two EN", b"D of", b" it"], ("END",), block)
    assert stopped
    assert "".join(texts) == "one two "
    # The token that begins with kept text stays; the one that only completes the stop goes.
    assert ids == (0, 1)


def test_what_may_become_a_stop_string_waits_and_is_released_if_not() -> None:
    texts, _, stopped = stream([b"a E", b"N", b"d"], ("END",))
    assert texts[0] == "a "
    assert texts[1] == ""
    assert not stopped
    assert "".join(texts) == "a ENd"


def test_earliest_of_several_stop_strings_wins() -> None:
    texts, _, stopped = stream([b"x", b" second first"], ("first", "second"))
    assert stopped
    assert "".join(texts) == "x "


def test_stop_string_completed_only_by_the_flush() -> None:
    texts, _, stopped = stream([b"say ", b"stop"], ("stop",))
    assert stopped
    assert "".join(texts) == "say "
