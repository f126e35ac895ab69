"""The real model with the packaged head, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.cluster.config import ServiceConfig
from outrider.cluster.demo import packaged_target
from outrider.cluster.loading import engine_config, load_link, target_config
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.target import Target
from outrider.verifier.types import GenerationRequest

QUESTIONS = (
    "Why does the moon have phases?",
    "Write a haiku about a lighthouse.",
    "List three uses of a paper clip.",
)
TOKENS = 40
# A block of rows and a single row round differently in bfloat16. Logits of 16 to 32 are 1/8 apart
# there; a choice may flip where the two best are within two such steps, and nowhere else.
NEAR_TIE = 0.25


@pytest.fixture(scope="module")
def config() -> ServiceConfig:
    config = ServiceConfig()
    return replace(
        config,
        target=replace(config.target, path=packaged_target(), dtype="bfloat16", max_context=512),
        draft=replace(config.draft, placement="colocated"),
    )


@pytest.fixture(scope="module")
def target(config: ServiceConfig) -> Target:
    torch.set_num_threads(1)
    return Target.load(target_config(config))


def answers(
    target: Target, config: ServiceConfig, drafts: int, temperature: float = 0.0
) -> tuple[list[list[int]], list[list[int]], Engine]:
    """Prompts, answers, and the engine that gave them."""
    engine = Engine(target, engine_config(config, "test"), load_link(config, {}))
    tokenizer: Any = target.tokenizer
    prompts: list[list[int]] = []
    texts: dict[str, list[int]] = {}
    for number, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=tuple(prompts[-1]),
                parameters=SamplingParameters(temperature=temperature),
                max_tokens=TOKENS,
                seed=number,
                num_speculative_tokens=drafts,
            )
        )
        texts[str(number)] = []
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return prompts, list(texts.values()), engine


def test_c1_bfloat16_answers_differ_at_near_ties_alone(
    target: Target, config: ServiceConfig
) -> None:
    prompts, plain, _ = answers(target, config, 0)
    _, drafted, engine = answers(target, config, 2)
    assert engine.stats.accepted_per_position[0] > 0
    for prompt, ours, theirs in zip(prompts, drafted, plain, strict=True):
        pairs = list(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        gap = top_two_gap(target, [*prompt, *theirs[:at]])
        assert gap <= NEAR_TIE, f"token {at} differs where the best two are {gap} apart"


def top_two_gap(target: Target, text: list[int]) -> float:
    target.model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            logits = target.model(torch.tensor([text])).logits[0, -1].float()
    finally:
        target.model.set_attn_implementation("outrider_paged")
    best = logits.topk(2).values
    return float(best[0] - best[1])


def test_packaged_head_is_worth_having(target: Target, config: ServiceConfig) -> None:
    """Well above what a random head reaches (which is nothing), at both temperatures."""
    for temperature, least in ((0.0, 0.2), (1.0, 0.15)):
        _, _, engine = answers(target, config, 2, temperature)
        stats = engine.stats
        assert stats.accepted_per_position[0] / stats.drafted_per_position[0] > least
        # The first token has no draft before it, the last one none after it.
        assert stats.undrafted_rounds <= 3
        assert stats.late_rounds == 0


def test_draft_link_stays_under_a_kilobyte_a_token(target: Target, config: ServiceConfig) -> None:
    from outrider.cluster.endpoints import DraftEndpoint
    from outrider.cluster.loading import load_drafter
    from outrider.protos.codec import encode
    from outrider.protos.messages import RequestOpen, VerdictBatch

    sizes: list[int] = []
    counts: list[int] = []
    endpoint = DraftEndpoint(load_drafter(config, "test")[0], config.draft.max_support)

    class Bytes:
        """Passes everything through the encoded messages, as a remote drafter does."""

        def __init__(self) -> None:
            self.inner = load_link(config, {})
            self.opens: list[bytes] = []

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def open(self, request: RequestOpen) -> None:
            self.opens.append(encode(request))
            self.inner.open(request)

        def send(self, verdicts: VerdictBatch) -> None:
            answer = endpoint.round(self.opens, encode(verdicts), [])
            self.opens = []
            wanted = int(verdicts.num_to_draft.sum())
            if wanted:
                sizes.append(len(answer))
                counts.append(wanted)
            self.inner.send(verdicts)

    engine = Engine(target, engine_config(config, "test"), Bytes())  # type: ignore[arg-type]
    engine.submit(
        GenerationRequest(
            request_id="r",
            prompt_ids=(1, 2, 3, 4),
            parameters=SamplingParameters(temperature=1.0),
            max_tokens=20,
            seed=1,
            ignore_eos=True,
        )
    )
    while engine.has_work():
        engine.step()
    assert sum(sizes) / sum(counts) <= 1024
