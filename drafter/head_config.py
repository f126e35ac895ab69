"""What an EAGLE-3 head is, read from its `config.json`, without torch.

Two conventions for the target layers are in use. `eagle_aux_hidden_state_layer_ids` at the top
level (vLLM) counts `hidden_states`: 0 is the embedding, i the output of decoder layer i counted
from one. The same key inside `eagle_config` (SpecForge, SGLang) counts decoder layers from zero,
so that i means their output and is one less. Here `feature_layers` is always the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class HeadError(ValueError):
    """A head that cannot be used; names the field, the value and the remedy."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head (Li et al., arXiv 2503.01840).

    hidden_size: width H of the head; target_hidden_size: width of one target feature layer.
    feature_layers: indices into the target's `hidden_states` (0 is the embedding).
    norm_before_residual: the residual carries the normalised feature (a SpecForge variant).
    rope: transformers' `rope_parameters`.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    feature_layers: tuple[int, ...]
    rope: Mapping[str, Any]
    attention_bias: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "draft_vocab_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise HeadError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadError(
                f"num_key_value_heads: {self.num_key_value_heads} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise HeadError(
                f"draft_vocab_size: {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if len(set(self.feature_layers)) != len(self.feature_layers) or not self.feature_layers:
            raise HeadError(f"feature_layers: {list(self.feature_layers)} must be distinct")
        if min(self.feature_layers) < 0:
            raise HeadError(f"feature_layers: {list(self.feature_layers)} must not be negative")

    @property
    def reduced(self) -> bool:
        """Whether the head drafts in a smaller vocabulary than the target's."""
        return self.draft_vocab_size < self.vocab_size


def default_feature_layers(num_target_layers: int) -> tuple[int, ...]:
    """The layers EAGLE-3 fuses unless told otherwise: low, middle, high.

    Raises:
        HeadError: a target too shallow for three distinct layers.
    """
    layers = (2, num_target_layers // 2, num_target_layers - 3)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise HeadError(
            f"feature_layers: the usual choice {list(layers)} is not increasing for a target of "
            f"{num_target_layers} layers; name eagle_aux_hidden_state_layer_ids in the head's "
            "config.json"
        )
    return layers


def read_head_config(folder: Path, num_target_layers: int | None = None) -> HeadConfig:
    """Reads `config.json` of a published EAGLE-3 head.

    Args:
        num_target_layers: the target's depth, for heads that name no layers.

    Raises:
        HeadError: missing file, missing or unusable field.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadError(f"head: no {path}; give a folder with config.json and weights") from error
    except ValueError as error:
        raise HeadError(f"head: {path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise HeadError(f"head: {path} holds no JSON object")
    return parse_head_config(raw, num_target_layers, source=str(path))


def parse_head_config(
    raw: Mapping[str, Any], num_target_layers: int | None = None, source: str = "config.json"
) -> HeadConfig:
    """The same from the parsed object."""
    if isinstance(raw.get("transformer_layer_config"), dict):  # the `speculators` format
        raw = {**raw["transformer_layer_config"], **raw}
    layers_in_head = int(raw.get("num_hidden_layers", 1))
    if layers_in_head != 1:
        raise HeadError(f"num_hidden_layers: {layers_in_head} in {source}; an EAGLE-3 head has 1")
    try:
        hidden = int(raw["hidden_size"])
        heads = int(raw["num_attention_heads"])
        vocab = int(raw["vocab_size"])
        config = HeadConfig(
            hidden_size=hidden,
            target_hidden_size=int(raw.get("target_hidden_size") or hidden),
            intermediate_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=int(raw.get("draft_vocab_size") or vocab),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            feature_layers=_feature_layers(raw, num_target_layers),
            rope=_rope(raw),
            attention_bias=bool(raw.get("attention_bias", False)),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
        )
    except KeyError as error:
        raise HeadError(f"{error.args[0]}: missing in {source}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, HeadError):
            raise
        raise HeadError(f"{source}: {error}") from error
    return config


def head_config_json(config: HeadConfig) -> dict[str, Any]:
    """`config.json` that vLLM, SGLang and SpecForge read: both spellings of the layers."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": config.attention_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.feature_layers],
            "use_aux_hidden_state": True,
        },
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_before_residual": config.norm_before_residual,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }


def _feature_layers(raw: Mapping[str, Any], num_target_layers: int | None) -> tuple[int, ...]:
    if raw.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(i) for i in raw["eagle_aux_hidden_state_layer_ids"])
    nested = raw.get("eagle_config") or {}
    if nested.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(i) + 1 for i in nested["eagle_aux_hidden_state_layer_ids"])
    if num_target_layers is None:
        raise HeadError(
            "eagle_aux_hidden_state_layer_ids: missing, and the target's depth is not known"
        )
    return default_feature_layers(num_target_layers)


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("rope_parameters"):
        return dict(raw["rope_parameters"])
    rope = dict(raw.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    rope["rope_theta"] = float(raw.get("rope_theta", 10000.0))
    return rope
