"""The EAGLE-3 head (Li et al., arXiv 2503.01840) as published, without a cache of its own.

One decoder layer. Row i takes the target's fused features of position i and the embedding of
token i+1, and its logits are the draft law of token i+2. Attention reads both, normalised apart
and laid side by side (2H in); the residual carries the feature. Module names are those of the
published checkpoints, so `state_dict()` is one.

T rows, H width, h / g query / key-value heads, D head width, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.drafter.head_config import HeadConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of the head's attention; how keys are found is the caller's affair."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        wide, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(wide, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The one decoder layer, in two halves around the attention itself."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        eps = config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, eps)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)

    def before(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the residual.

        Args:
            embeds, hidden: [..., H]; cos, sin: [..., D] of each row's position.

        Returns:
            q [..., h, D], k and v [..., g, D], residual [..., H].
        """
        c = self.config
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        lead = x.shape[:-1]
        q = self.self_attn.q_proj(x).view(*lead, c.num_attention_heads, c.head_dim)
        k = self.self_attn.k_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        v = self.self_attn.v_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        cos, sin = cos.unsqueeze(-2).to(q.dtype), sin.unsqueeze(-2).to(q.dtype)
        residual = normed if c.norm_before_residual else hidden
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v, residual

    def after(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended [..., h*D], residual [..., H] -> the layer's output [..., H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """`fc`, the layer, the final norm and the reduced lm_head, with the vocabulary maps.

    d2t [V'] int64 holds offsets: draft id i is target id i + d2t[i]; t2d [V] bool marks the
    target ids that can be drafted. Both are absent from a full-vocabulary head's checkpoint.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        fused = len(config.feature_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.t2d[: config.draft_vocab_size] = True

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H], the layer's output -> draft logits [..., V']."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def target_ids(self) -> Tensor:
        """[V'] int64: the target id of each draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t


def rope_tables(
    config: HeadConfig, length: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, D] float32 for positions 0..length-1, scaling applied."""
    parameters: dict[str, Any] = dict(config.rope)
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
    ).to(device)
    positions = torch.arange(length, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    return cos[0], sin[0]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
