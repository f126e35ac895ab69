"""The law of whole answers: engine, link, drafter and sampler together, at temperature 1.

The law of the first three tokens is enumerated from the model itself, in float64, and compared
with 6,000 answers by chi-square; a test fails by chance once in 10^6 runs. Each control breaks one
thing on purpose and has to fail the same comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.cluster.links import InProcessDraftLink
from outrider.drafter.eagle import DraftSettings, Eagle3Drafter
from outrider.protos.messages import DraftBatch, VerdictBatch
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.types import EngineConfig, GenerationRequest
from tests.drafter.heads import tiny_head
from tests.models import WORDS, prompts, tiny_model, tiny_target

FALSE_ALARM = 1e-6
ANSWERS = 6000
PROMPT = prompts([6])[0]
FEW = SamplingParameters(temperature=0.9, top_k=4)
ALL = SamplingParameters(temperature=1.0)
Change = Callable[[DraftBatch], DraftBatch]


class ChangedDrafter(Eagle3Drafter):
    """Ships something else than what it drew from, for the controls."""

    change: Change = staticmethod(lambda batch: batch)

    def propose(self, verdicts: VerdictBatch) -> DraftBatch:
        return self.change(super().propose(verdicts))


def answers(
    parameters: SamplingParameters, k: int, change: Change | None = None, count: int = 3
) -> Counter[tuple[int, ...]]:
    """The first tokens of many answers, each with its own seed, 64 at a time."""
    torch.set_num_threads(1)
    target = tiny_target()
    drafter = ChangedDrafter(
        tiny_head(),
        target.model.get_input_embeddings().weight.detach(),
        DraftSettings(cache_blocks=512, block_size=4),
        torch.device("cpu"),
    )
    if change is not None:
        drafter.change = change  # type: ignore[method-assign]
    engine = Engine(
        target,
        EngineConfig(num_speculative_tokens=k, kv_bytes=2**22, max_waiting=ANSWERS),
        InProcessDraftLink(drafter),
    )
    for seed in range(ANSWERS):
        engine.submit(
            GenerationRequest(
                request_id=str(seed),
                prompt_ids=PROMPT,
                parameters=parameters,
                max_tokens=6,
                seed=seed,
            )
        )
    texts: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
    assert len(texts) == ANSWERS
    if k and change is None:
        accepted = engine.stats.accepted_per_position
        assert 0 < accepted[0] < engine.stats.drafted_per_position[0]
    return Counter(tuple(text[:count]) for text in texts.values())


def probabilities(text: tuple[int, ...], parameters: SamplingParameters) -> np.ndarray:
    """The plain law of the next token, float64 [61]."""
    return probabilities_of([text], parameters)[0]


def probabilities_of(texts: list[tuple[int, ...]], parameters: SamplingParameters) -> np.ndarray:
    with torch.no_grad():
        logits = _model()(torch.tensor(texts)).logits[:, -1, :WORDS].double()
    logits = logits / parameters.temperature
    if parameters.top_k:
        least = logits.topk(parameters.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    law: np.ndarray = logits.softmax(-1).numpy()
    return law


@cache
def _model() -> torch.nn.Module:
    return tiny_model()


def law_of_three(parameters: SamplingParameters) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        texts = list(law)
        rows = probabilities_of([PROMPT + text for text in texts], parameters)
        law = {
            (*text, token): law[text] * rows[i, token]
            for i, text in enumerate(texts)
            for token in np.flatnonzero(rows[i] > 0).tolist()
        }
    return law


def law_of_third(parameters: SamplingParameters) -> dict[tuple[int, ...], float]:
    """Marginal of the third token over all 61^2 beginnings."""
    first = probabilities(PROMPT, parameters)
    second = probabilities_of([(*PROMPT, t) for t in range(WORDS)], parameters)
    total = np.zeros(WORDS)
    for t in range(WORDS):
        texts = [(*PROMPT, t, u) for u in range(WORDS)]
        total += first[t] * (second[t] @ probabilities_of(texts, parameters))
    return {(t,): float(total[t]) for t in range(WORDS)}


def chance(seen: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> float:
    """p-value of chi-square; rare outcomes are put together."""
    if any(outcome not in law for outcome in seen):
        return 0.0
    total = sum(seen.values())
    common = [o for o, p in law.items() if p * total >= 8]
    observed = [float(seen.get(o, 0)) for o in common]
    expected = [law[o] * total for o in common]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    if expected[-1] < 8:
        observed[-2:] = [sum(observed[-2:])]
        expected[-2:] = [sum(expected[-2:])]
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


def thirds(seen: Counter[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    out: Counter[tuple[int, ...]] = Counter()
    for text, count in seen.items():
        out[text[2:3]] += count
    return out


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_three_tokens_follow_the_plain_law(k: int) -> None:
    law = law_of_three(FEW)
    assert len(law) == 4**3
    assert abs(sum(law.values()) - 1) < 1e-12
    assert chance(answers(FEW, k), law) > FALSE_ALARM


def test_third_token_follows_the_plain_law_over_the_whole_vocabulary() -> None:
    assert chance(thirds(answers(ALL, 2)), law_of_third(ALL)) > FALSE_ALARM


def flattened(batch: DraftBatch) -> DraftBatch:
    """Another q than the one drawn from: as if temperature had been forgotten in it."""
    weights = batch.support_weights.astype(np.float32).copy()
    for n in range(len(batch.token_ids)):
        span = slice(int(batch.cu_support[n]), int(batch.cu_support[n + 1]))
        weights[span] = 1 / max(1, span.stop - span.start)
    return replace(
        batch, support_weights=(np.floor(weights * 2**10) / 2**10 * 0.998).astype(np.float16)
    )


def dropped_when_unlikely(batch: DraftBatch) -> DraftBatch:
    """Keeps a chain only if its first token was likely: shipping depends on the token drawn."""
    keep = []
    for entry in range(len(batch.request_ids)):
        n = int(batch.cu_num_draft_tokens[entry])
        span = slice(int(batch.cu_support[n]), int(batch.cu_support[n + 1]))
        place = np.flatnonzero(batch.support_ids[span] == batch.token_ids[n])
        keep.append(bool(len(place)) and float(batch.support_weights[span][place[0]]) > 0.25)
    ids = np.where(keep, batch.request_ids, -1 - np.arange(len(keep)))
    return replace(batch, request_ids=ids.astype(np.int64))


def called_deterministic(batch: DraftBatch) -> DraftBatch:
    """Sampled tokens shipped without their q, as if nothing had been drawn."""
    return replace(
        batch,
        deterministic=True,
        cu_support=np.zeros_like(batch.cu_support),
        support_ids=batch.support_ids[:0],
        support_weights=batch.support_weights[:0],
    )


CONTROLS = {
    "another q": flattened,
    "dropped by its own probability": dropped_when_unlikely,
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_broken_drafter_contract_is_caught(control: str) -> None:
    seen = answers(FEW, 2, CONTROLS[control])
    assert chance(seen, law_of_three(FEW)) < FALSE_ALARM


def test_a12_one_hot_drafts_are_lossless_however_they_were_chosen() -> None:
    """Accept with p(x), else p without x: right for a token drawn from any law."""
    assert chance(answers(FEW, 2, called_deterministic), law_of_three(FEW)) > FALSE_ALARM
