"""Tiny random EAGLE-3 heads for the tests, of a target's own sizes."""

from __future__ import annotations

import torch

from outrider.drafter.head import Eagle3Head
from outrider.drafter.head_config import HeadConfig


def tiny_config(**changes: object) -> HeadConfig:
    """Fits the tiny target: vocabulary 61, hidden 32, 4 heads, 2 KV heads, 8 layers."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "draft_vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "feature_layers": (2, 4, 5),
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    }
    fields.update(changes)
    return HeadConfig(**fields)  # type: ignore[arg-type]


def tiny_head(seed: int = 0, **changes: object) -> Eagle3Head:
    """A random float32 head whose draft vocabulary is spread over the target's."""
    torch.manual_seed(seed)
    config = tiny_config(**changes)
    head = Eagle3Head(config)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    size = config.draft_vocab_size
    ids = torch.randperm(config.vocab_size)[:size].sort().values
    head.d2t.copy_(ids - torch.arange(size))
    head.t2d.zero_()
    head.t2d[ids] = True
    return head.eval()
