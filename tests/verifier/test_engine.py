"""The round against transformers' own decoding, with drafters of every character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.protos.messages import DraftBatch
from outrider.protos.sampling import InvalidField, SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.link import DraftLink, NullLink
from outrider.verifier.types import EngineConfig, GenerationRequest, TokenOutput
from tests.models import POSITIONS, greedy, prompts, tiny_model, tiny_target
from tests.verifier.links import ScriptedLink, adversary, mixed, oracle, short

GREEDY = SamplingParameters(temperature=0.0)
COUNT = 16
LENGTHS = (1, 3, 9, 20, 11, 30, 2, 8)


def make_engine(link: DraftLink, eos: Sequence[int] = (), **settings: object) -> Engine:
    options: dict[str, object] = {"kv_bytes": 2**20, "block_size": 4, **settings}
    return Engine(tiny_target(eos=eos), EngineConfig(**options), link)  # type: ignore[arg-type]


def ask(prompt: Sequence[int], name: str = "r", **fields: object) -> GenerationRequest:
    values: dict[str, object] = {
        "request_id": name,
        "prompt_ids": tuple(prompt),
        "parameters": GREEDY,
        "max_tokens": COUNT,
        "seed": 5,
        **fields,
    }
    return GenerationRequest(**values)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[str, list[TokenOutput]]:
    """Rounds until nothing is left; integrity after every one."""
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    return outputs


def tokens(outputs: Sequence[TokenOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def references(asked: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Sequence[int]]:
    return {p: greedy(p, COUNT) for p in asked}


SCRIPTS: dict[str, Callable[..., object]] = {
    "oracle": oracle,
    "adversary": adversary,
    "short": short,
    "mixed": mixed,
    "empty": lambda _: lambda *__: [],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("chunk", [7, 64])
def test_c1_d8_greedy_equals_generate(script: str, k: int, batch: int, chunk: int) -> None:
    """Token for token in float32, for every K, ragged batches, and both prefill chunks."""
    asked = prompts(LENGTHS[:batch])
    link = ScriptedLink(SCRIPTS[script](references(asked)))  # type: ignore[arg-type]
    engine = make_engine(link, num_speculative_tokens=k, prefill_chunk=chunk)
    for number, prompt in enumerate(asked):
        engine.submit(ask(prompt, str(number)))
    outputs = run(engine)
    for number, prompt in enumerate(asked):
        assert tokens(outputs[str(number)]) == greedy(prompt, COUNT), number
    stats = engine.stats
    if k == 0:
        assert not link.verdicts
        assert stats.drafted_per_position == ()
    elif script == "oracle":
        assert stats.accepted_per_position == stats.drafted_per_position
    elif script == "adversary":
        assert sum(stats.accepted_per_position) == 0
    elif script == "empty":
        assert stats.drafted_per_position == ()
        assert stats.undrafted_rounds > 0
    assert not link.lives, "every opened request is closed"


@pytest.mark.parametrize("accepted", range(4))
def test_f1_cache_and_features_equal_a_recompute(accepted: int) -> None:
    (prompt,) = prompts([10])
    answer = greedy(prompt, COUNT)

    def script(_: object, text: list[int], wanted: int) -> list[int]:
        at = len(text) - len(prompt)
        return [t if i < accepted else (t + 3) % 61 for i, t in enumerate(answer[at : at + wanted])]

    link = ScriptedLink(script)
    engine = make_engine(link, num_speculative_tokens=3)
    engine.submit(ask(prompt))
    for _ in range(3):
        engine.step()
    (request,) = engine.scheduler.running
    text = [*prompt, *answer][: request.committed]
    assert request.tokens == text
    assert request.computed == request.committed - 1
    with torch.no_grad():
        whole = tiny_model().model(
            torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=True
        )
    for layer in range(8):
        keys, values = engine.pool.read(layer, request.blocks, request.computed)
        cache = whole.past_key_values.layers[layer]
        torch.testing.assert_close(keys, cache.keys[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values, cache.values[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
    expected = torch.cat([whole.hidden_states[i][0] for i in (2, 4, 5)], -1)
    for verdict in link.verdicts:
        base, rows = int(verdict.base_lengths[0]), len(verdict.token_ids)
        torch.testing.assert_close(
            torch.from_numpy(verdict.features), expected[base : base + rows], atol=1e-5, rtol=1e-4
        )
        # F8: the feature of position i travels with the token of position i + 1.
        assert verdict.token_ids.tolist() == text[base + 1 : base + rows + 1]


FAULTS: dict[str, Callable[[DraftBatch], DraftBatch]] = {
    "another epoch": lambda b: replace(b, epochs=b.epochs + 1),
    "another base": lambda b: replace(b, base_lengths=b.base_lengths - 1),
    "another last token": lambda b: replace(b, last_token_ids=(b.last_token_ids + 1) % 61),
    "another request": lambda b: replace(b, request_ids=b.request_ids + 100),
    "an id beyond the words": lambda b: replace(b, token_ids=np.full_like(b.token_ids, 62)),
    "a negative id": lambda b: replace(b, token_ids=np.full_like(b.token_ids, -1)),
    "a huge id": lambda b: replace(b, token_ids=np.full_like(b.token_ids, 2**31 - 1)),
    "a broken chain": lambda b: replace(b, parents=np.zeros_like(b.parents)),
    "broken offsets": lambda b: replace(b, cu_num_draft_tokens=b.cu_num_draft_tokens * 3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_b2_f6_unfit_drafts_are_dropped_and_counted(fault: str) -> None:
    asked = prompts([5, 12])
    link = ScriptedLink(oracle(references(asked)), FAULTS[fault])
    engine = make_engine(link, num_speculative_tokens=3)
    for number, prompt in enumerate(asked):
        engine.submit(ask(prompt, str(number)))
    outputs = run(engine)
    for number, prompt in enumerate(asked):
        assert tokens(outputs[str(number)]) == greedy(prompt, COUNT)
    stats = engine.stats
    assert sum(stats.drafted_per_position) == 0
    offsets = fault == "broken offsets"
    assert stats.stale_drafts + stats.malformed_drafts > 0 or offsets
    assert stats.undrafted_rounds == COUNT


def test_f6_control_without_the_match_a_wrong_text_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stale drafts of one request are taken for another's once the check is off: the one-hot law
    still holds, but the drafts counted as verified are not those of the committed state."""
    asked = prompts([5])
    link = ScriptedLink(oracle(references(asked)), FAULTS["another base"])
    monkeypatch.setattr("outrider.verifier.drafts._fits", lambda *_: True)
    engine = make_engine(link, num_speculative_tokens=3)
    engine.submit(ask(asked[0]))
    run(engine)
    assert sum(engine.stats.drafted_per_position) > 0


def test_a9_sampled_drafts_without_their_law_are_refused() -> None:
    asked = prompts([5])
    link = ScriptedLink(oracle(references(asked)), lambda b: replace(b, deterministic=False))
    engine = make_engine(link, num_speculative_tokens=3)
    engine.submit(ask(asked[0], parameters=SamplingParameters(temperature=1.0)))
    run(engine)
    assert engine.stats.lawless_drafts > 0
    assert sum(engine.stats.drafted_per_position) == 0


@pytest.mark.parametrize("position", range(4))
def test_d1_eos_inside_a_block_ends_the_answer_there(position: int) -> None:
    (prompt,) = prompts([9])
    answer = greedy(prompt, COUNT)
    eos = answer[position]
    end = answer.index(eos) + 1
    engine = make_engine(
        ScriptedLink(oracle(references([prompt]))), eos=[eos], num_speculative_tokens=3
    )
    engine.submit(ask(prompt))
    outputs = run(engine)["r"]
    assert tokens(outputs) == answer[:end]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].completion_tokens == end


@pytest.mark.parametrize(("stop_at", "reason"), [(3, "stop"), (5, "stop"), (6, "length")])
def test_d2_earliest_end_wins_and_a_stop_wins_a_tie(stop_at: int, reason: str) -> None:
    prompt = next(p for p in prompts([9] * 40, seed=3) if len(set(greedy(p, 6))) == 6)
    answer = greedy(prompt, COUNT)
    engine = make_engine(ScriptedLink(oracle(references([prompt]))), num_speculative_tokens=5)
    engine.submit(ask(prompt, max_tokens=5, stop_token_ids=(answer[stop_at - 1],)))
    outputs = run(engine)["r"]
    assert outputs[-1].finish_reason == reason
    assert tokens(outputs) == answer[: min(stop_at, 5)]


@pytest.mark.parametrize("length", range(58, 64))
def test_d5_prompts_at_the_limit_end_with_it(length: int) -> None:
    near, other = prompts([length, 6])
    known = references([other])
    known[near] = greedy(near, POSITIONS - length)
    engine = make_engine(ScriptedLink(oracle(known)), num_speculative_tokens=5, prefill_chunk=16)
    engine.submit(ask(near, "near", max_tokens=50))
    engine.submit(ask(other, "other"))
    outputs = run(engine)
    assert tokens(outputs["near"]) == known[near]
    assert outputs["near"][-1].finish_reason == "length"
    assert tokens(outputs["other"]) == known[other]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": ()}, "prompt"),
        ({"prompt_ids": (1,) * 64}, "prompt"),
        ({"prompt_ids": (1,) * 65}, "prompt"),
        ({"prompt_ids": (61,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"parameters": SamplingParameters(temperature=float("nan"))}, "temperature"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop_token_ids": (61,)}, "stop_token_ids"),
    ],
)
def test_bad_requests_name_the_field_and_leave_others_alone(
    fields: dict[str, object], named: str
) -> None:
    (prompt,) = prompts([5])
    engine = make_engine(NullLink())
    engine.submit(ask(prompt, "good"))
    with pytest.raises(InvalidField) as caught:
        engine.submit(ask((1,), "bad", **fields))
    assert caught.value.field == named
    assert tokens(run(engine)["good"]) == greedy(prompt, COUNT)


def test_cancel_ends_one_request_and_frees_its_blocks() -> None:
    asked = prompts([5, 6])
    engine = make_engine(ScriptedLink(oracle(references(asked))), num_speculative_tokens=2)
    for number, prompt in enumerate(asked):
        engine.submit(ask(prompt, str(number)))
    engine.step()
    engine.cancel("0")
    outputs = run(engine)
    assert outputs["0"][-1].finish_reason == "cancelled"
    assert outputs["1"][-1].finish_reason == "length"


def test_preemption_when_blocks_run_out_changes_no_token() -> None:
    asked = prompts([20, 20, 20, 20])
    link = ScriptedLink(mixed(references(asked)))
    # 64 positions fit, and little more: the requests cannot all run to their ends together.
    engine = make_engine(link, num_speculative_tokens=2, kv_bytes=26 * 4 * 1024)
    for number, prompt in enumerate(asked):
        engine.submit(ask(prompt, str(number)))
    outputs = run(engine)
    assert engine.stats.preemptions > 0
    for number, prompt in enumerate(asked):
        assert tokens(outputs[str(number)]) == greedy(prompt, COUNT)


def test_b1_non_finite_logits_fail_their_request_alone() -> None:
    asked = prompts([5, 9])
    engine = make_engine(NullLink(), num_speculative_tokens=0)
    bad = next(t for t in range(61) if t not in {x for p in asked for x in (*p, *greedy(p, 16))})
    with torch.no_grad():
        engine.target.model.model.embed_tokens.weight[bad] = float("nan")
    engine.submit(ask((*asked[0][:-1], bad), "bad"))
    engine.submit(ask(asked[1], "good"))
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert "not finite" in str(outputs["bad"][-1].error)
    assert tokens(outputs["good"]) == greedy(asked[1], COUNT)


def test_d7_rounds_without_drafts_leave_no_trace_in_the_rates() -> None:
    (prompt,) = prompts([5])
    right = oracle(references([prompt]))
    link = ScriptedLink(lambda o, t, w: right(o, t, w) if len(t) % 2 else [])
    engine = make_engine(link, num_speculative_tokens=1)
    engine.submit(ask(prompt))
    outputs = run(engine)["r"]
    assert tokens(outputs) == greedy(prompt, COUNT)
    stats = engine.stats
    assert stats.drafted_per_position == stats.accepted_per_position
    assert stats.undrafted_rounds > 0
