"""Penalties, bias and masks under speculation equal plain decoding with transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from outrider.protos.sampling import SamplingParameters
from outrider.verifier.logits_processing import LogitsProcessor
from tests.models import WORDS, prompts, tiny_model
from tests.verifier.links import ScriptedLink
from tests.verifier.test_engine import COUNT, ask, make_engine, run, tokens

PENALISED = SamplingParameters(
    temperature=0.0, repetition_penalty=1.3, frequency_penalty=2.0, presence_penalty=0.4
)


def plain(prompt: tuple[int, ...], parameters: SamplingParameters) -> tuple[int, ...]:
    """Greedy decoding one token at a time, processed by an independent rule."""
    model, text = tiny_model(), list(prompt)
    repetition = LogitsProcessorList()
    if parameters.repetition_penalty != 1:
        repetition.append(RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty))
    for _ in range(COUNT):
        with torch.no_grad():
            row = model(torch.tensor([text])).logits[0, -1, :WORDS].clone()
        row = repetition(torch.LongTensor([text]), torch.FloatTensor(row[None]))[0]
        for token in set(text[len(prompt) :]):
            count = text[len(prompt) :].count(token)
            row[token] -= parameters.frequency_penalty * count + parameters.presence_penalty
        for token, bias in parameters.logit_bias:
            row[token] += bias
        if parameters.allowed_token_ids is not None:
            masked = torch.full_like(row, float("-inf"))
            allowed = list(parameters.allowed_token_ids)
            masked[allowed] = row[allowed]
            row = masked
        text.append(int(row.argmax()))
    return tuple(text[len(prompt) :])


def under_speculation(
    prompt: tuple[int, ...], parameters: SamplingParameters, drafts: tuple[int, ...], k: int
) -> tuple[tuple[int, ...], int]:
    """The answer with these tokens drafted at their places, and how many were accepted."""

    def script(_: object, text: list[int], wanted: int) -> tuple[int, ...]:
        at = len(text) - len(prompt)
        return drafts[at : at + wanted]

    engine = make_engine(ScriptedLink(script), num_speculative_tokens=k)
    engine.submit(ask(prompt, parameters=parameters))
    return tokens(run(engine)["r"]), sum(engine.stats.accepted_per_position)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_c2_penalties_see_the_drafts_before_each_row(k: int) -> None:
    (prompt,) = prompts([7])
    expected = plain(prompt, PENALISED)
    answer, accepted = under_speculation(prompt, PENALISED, expected, k)
    assert answer == expected
    assert (accepted > 0) is (k > 0)


@pytest.mark.parametrize("k", [2, 5])
def test_c2_a_draft_that_repeats_itself_is_penalised_inside_the_block(k: int) -> None:
    (prompt,) = prompts([7])
    expected = plain(prompt, PENALISED)
    repeated = tuple(expected[i - i % 2] for i in range(COUNT))  # every token twice
    answer, _ = under_speculation(prompt, PENALISED, repeated, k)
    assert answer == expected


def test_c2_control_history_without_the_drafts_gives_another_answer() -> None:
    (prompt,) = prompts([7])
    expected = plain(prompt, PENALISED)
    apply = LogitsProcessor.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitsProcessor, "apply", lambda self, rows, drafts: apply(self, rows, []))
        repeated = tuple(expected[i - i % 2] for i in range(COUNT))
        answer, _ = under_speculation(prompt, PENALISED, repeated, 5)
    assert answer != expected


def test_c3_bias_holds_at_every_verified_position() -> None:
    (prompt,) = prompts([7])
    free = plain(prompt, SamplingParameters(temperature=0.0))
    banned = SamplingParameters(temperature=0.0, logit_bias=((free[1], -100.0),))
    answer, _ = under_speculation(prompt, banned, free, 5)
    assert free[1] not in answer
    assert answer == plain(prompt, banned)


def test_d12_masks_hold_at_draft_rows_and_at_the_bonus_row() -> None:
    (prompt,) = prompts([7])
    even = SamplingParameters(temperature=0.0, allowed_token_ids=tuple(range(0, WORDS, 2)))
    expected = plain(prompt, even)
    # An odd draft among right ones, and all right ones, so that both kinds of row decide.
    spoilt = tuple(t + 1 if i % 3 == 1 else t for i, t in enumerate(expected))
    for drafts in (spoilt, expected):
        answer, accepted = under_speculation(prompt, even, drafts, 2)
        assert answer == expected
        assert all(token % 2 == 0 for token in answer)
        assert accepted > 0


def test_processing_one_request_leaves_its_neighbours_alone() -> None:
    first, second = prompts([7, 9])
    engine = make_engine(ScriptedLink(lambda *_: []), num_speculative_tokens=2)
    engine.submit(ask(first, "penalised", parameters=PENALISED))
    engine.submit(ask(second, "plain"))
    outputs = run(engine)
    assert tokens(outputs["penalised"]) == plain(first, PENALISED)
    assert tokens(outputs["plain"]) == plain(second, SamplingParameters(temperature=0.0))
