"""Seeded answers: what a request's neighbours do must not reach its random numbers."""

from __future__ import annotations

import pytest
import torch

from outrider.cluster.links import InProcessDraftLink
from outrider.drafter.eagle import DraftSettings, Eagle3Drafter
from outrider.protos.sampling import SamplingParameters
from outrider.verifier.engine import Engine
from outrider.verifier.types import EngineConfig, GenerationRequest
from tests.drafter.heads import tiny_head
from tests.models import prompts, tiny_target

PROMPT, *OTHERS = prompts([6, 11, 3, 20], seed=4)


def answers(requests: list[GenerationRequest]) -> dict[str, tuple[int, ...]]:
    target = tiny_target()
    table = target.model.get_input_embeddings().weight.detach()
    drafter = Eagle3Drafter(tiny_head(), table, DraftSettings(block_size=4), torch.device("cpu"))
    config = EngineConfig(num_speculative_tokens=2, kv_bytes=2**20)
    engine = Engine(target, config, InProcessDraftLink(drafter))
    for request in requests:
        engine.submit(request)
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, ()) + output.token_ids
    return texts


def ask(name: str, seed: int, prompt: tuple[int, ...] = PROMPT, **more: object):
    fields: dict[str, object] = {
        "parameters": SamplingParameters(temperature=1.0),
        "max_tokens": 20,
        **more,
    }
    return GenerationRequest(name, prompt, seed=seed, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_c5_a_seed_gives_the_same_answer_alone_and_among_others(seed: int) -> None:
    """Neighbours draft 0, 1 and 5 tokens, greedily and not, and end at other times."""
    alone = answers([ask("mine", seed)])["mine"]
    together = answers(
        [
            ask("a", 1, OTHERS[0], num_speculative_tokens=0),
            ask("b", 2, OTHERS[1], num_speculative_tokens=1, max_tokens=5),
            ask("mine", seed),
            ask("c", 3, OTHERS[2], num_speculative_tokens=5,
                parameters=SamplingParameters(temperature=0.0)),
        ]
    )  # fmt: skip
    assert together["mine"] == alone


def test_c5_control_other_seeds_and_samples_give_other_answers() -> None:
    texts = answers([ask("a", 5), ask("b", 6), ask("c", 5, sample_index=1)])
    assert len(set(texts.values())) == 3
