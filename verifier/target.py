"""The target model: one packed forward pass for all requests of a round.

Axes: T packed rows, R rows with logits, V rows of the output matrix, W the hidden width.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.protos.sampling import InvalidField
from outrider.verifier import attention, loading
from outrider.verifier.attention import AttentionPlane, Segment, plan_attention
from outrider.verifier.compiled import CompiledBuckets
from outrider.verifier.device import own_device
from outrider.verifier.kv_cache import KVPool, KVShape
from outrider.verifier.types import TargetConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedBatch:
    """The new tokens of a round, request behind request, without padding."""

    token_ids: Sequence[int]  # [T]
    positions: Sequence[int]  # [T]
    segments: Sequence[Segment]
    logit_rows: Sequence[int]  # [R], rising


@dataclass(frozen=True)
class ForwardOutput:
    """logits [R, V] in the model's dtype; states: by layer asked for, [T, W]."""

    logits: Tensor
    states: Mapping[int, Tensor]


class Target:
    """A causal language model of the Llama, Mistral, Qwen2 or Qwen3 family.

    `vocab_size` counts the real words; rows of the output matrix beyond them are padding.
    `max_positions` is the model's own limit and never more than its sliding window, so that
    the window never hides a key.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int = 0,
        eos_token_ids: Collection[int] = (),
        tokenizer: Any | None = None,
        compiled: CompiledBuckets | None = None,
    ) -> None:
        description = model.config
        loading.check_family(description)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.device: torch.device = model.lm_head.weight.device
        self.dtype: torch.dtype = model.lm_head.weight.dtype
        self.vocab_size = vocab_size or description.vocab_size
        if not 1 <= self.vocab_size <= description.vocab_size:
            raise InvalidField(
                "vocab_size", vocab_size, f"the model has {description.vocab_size} rows"
            )
        self.hidden_size: int = description.hidden_size
        self.num_layers: int = description.num_hidden_layers
        self.norm_eps: float = description.rms_norm_eps
        self.max_positions = _max_positions(description)
        self._heads: int = description.num_attention_heads
        self.kv_shape = KVShape(
            num_layers=self.num_layers,
            num_kv_heads=description.num_key_value_heads,
            head_dim=getattr(description, "head_dim", None) or self.hidden_size // self._heads,
            dtype=self.dtype,
        )
        self._plane: AttentionPlane | None = None
        self._compiled = compiled

    @staticmethod
    def load(config: TargetConfig, device: torch.device | None = None) -> Target:
        """Opens a model from a folder, a GGUF file or the hub.

        Raises:
            InvalidField: a path or a model that cannot be served; one line with the remedy.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        model = loading.load_model(config, device or own_device())
        tokenizer = loading.load_tokenizer(config.path)
        rows: int = model.config.vocab_size
        words = min(len(tokenizer), rows) if tokenizer is not None else rows
        compiled = CompiledBuckets(config.buckets) if config.compile == "warmup" else None
        return Target(
            model,
            vocab_size=config.vocab_size or words,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            tokenizer=tokenizer,
            compiled=compiled,
        )

    def attach_cache(self, pool: KVPool) -> None:
        """Names the cache that forward passes read and write."""
        self._plane = AttentionPlane(pool, self._heads)

    @torch.no_grad()
    def forward(self, batch: PackedBatch, keep: Collection[int] = ()) -> ForwardOutput:
        """Runs the new tokens, writing their keys and values into the cache.

        Args:
            keep: hidden states to return, counted as transformers does: 0 is the embedding, i
                the output of layer i, and the last one is normalised.
        """
        plane = self._plane
        assert plane is not None, "attach_cache comes first"
        count = len(batch.token_ids)
        graph = self._compiled.graph_for(count) if self._compiled is not None else None
        padding = 0 if graph is None else graph.rows - count
        plane.plan = plan_attention(
            batch.segments,
            padding,
            plane.pool.block_size,
            self._heads // self.kv_shape.num_kv_heads,
            self.dtype,
            self.device,
        )
        ids = torch.tensor([[*batch.token_ids, *[0] * padding]], device=self.device)
        positions = torch.tensor([[*batch.positions, *[0] * padding]], device=self.device)
        rows = torch.tensor(batch.logit_rows, dtype=torch.long, device=self.device)
        try:
            if graph is not None:
                logits, kept = graph.run(ids, positions)
                states = {layer: kept[layer] for layer in keep}
                return ForwardOutput(logits.index_select(0, rows), states)
            final, states = self._layers(ids, positions, plane.number, keep)
            if len(batch.logit_rows) < count:
                final = final.index_select(0, rows)
            return ForwardOutput(self.model.lm_head(final), states)
        finally:
            plane.plan = None

    def warm_up(self) -> None:
        """Compiles the buckets that were asked for; rounds run eagerly until then."""
        if self._compiled is None:
            return
        plane = self._plane
        assert plane is not None, "attach_cache comes first"
        number = plane.number

        def whole(ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            everything = range(self.num_layers + 1)
            final, states = self._layers(ids, positions, number, everything)
            return self.model.lm_head(final), tuple(states[layer] for layer in everything)

        for rows in self._compiled.buckets:
            plane.plan = plan_attention([], rows, plane.pool.block_size, 1, self.dtype, self.device)
            ids = torch.zeros(1, rows, dtype=torch.long, device=self.device)
            self._compiled.compile(whole, rows, (ids, ids.clone()))
        plane.plan = None

    def _layers(
        self, ids: Tensor, positions: Tensor, plane: int, keep: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """ids, positions [1, T] -> the normalised output [T, W] and the states to keep."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids)
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        states: dict[int, Tensor] = {}
        for number, layer in enumerate(decoder.layers):
            if number in keep:
                states[number] = hidden[0]
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotary,
                position_ids=positions,
                plane=plane,
            )
        final = decoder.norm(hidden)[0]
        if self.num_layers in keep:
            states[self.num_layers] = final
        return final, states


def _max_positions(description: Any) -> int:
    limit: int = description.max_position_embeddings
    window: int | None = getattr(description, "sliding_window", None)
    types = getattr(description, "layer_types", None)
    if window is not None and (types is None or "sliding_attention" in types) and window < limit:
        logger.info("the context ends at the sliding window of %d positions", window)
        return window
    return limit


def _eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    held: set[int] = set()
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        held.update([value] if isinstance(value, int) else value or ())
    return frozenset(held)
