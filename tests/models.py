"""The tiny random target of the tests: float32, 61 words in 64 rows, 8 layers, 64 positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verifier.target import Target

WORDS = 61
POSITIONS = 64


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """A fresh model; the same for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tiny_target(seed: int = 0, eos: Sequence[int] = ()) -> Target:
    """The same, as the engine serves it."""
    return Target(tiny_model(seed), vocab_size=WORDS, eos_token_ids=eos)


@cache
def greedy(prompt: tuple[int, ...], count: int, seed: int = 0) -> tuple[int, ...]:
    """What transformers' `generate` answers at temperature 0; padding rows are never an answer."""
    ids = torch.tensor([list(prompt)])
    answer = tiny_model(seed).generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else a prompt's own zeros are taken for padding
        max_new_tokens=count,
        do_sample=False,
        suppress_tokens=list(range(WORDS, 64)),
    )
    return tuple(answer[0, len(prompt) :].tolist())


def prompts(lengths: Sequence[int], seed: int = 1) -> list[tuple[int, ...]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(0, WORDS, (length,), generator=generator).tolist())
        for length in lengths
    ]
