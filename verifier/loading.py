"""Opening a model: a folder of safetensors, a GGUF file or a hub id, and never anyone's code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from outrider.protos.sampling import InvalidField
from outrider.verifier import attention
from outrider.verifier.types import TargetConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MOVING_ROPES = ("dynamic", "longrope")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Where a model is. `name`: what transformers is given; `gguf`: the file in it, if any."""

    name: str
    gguf: str | None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained`."""
        held: dict[str, Any] = {"trust_remote_code": False}
        if self.gguf is not None:
            held["gguf_file"] = self.gguf
        return held


def find(path: str) -> Source:
    """Says what a path is.

    Raises:
        InvalidField: nothing that can be served.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix != ".gguf":
            raise InvalidField(
                "path", path, "give a .gguf file or a folder with config.json and safetensors"
            )
        return Source(str(place.parent), place.name)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise InvalidField("path", path, "the folder holds no config.json; name the model's")
        if not any(place.glob("*.safetensors")):
            pickled = sorted(p.name for p in (*place.glob("*.bin"), *place.glob("*.pt")))
            held = f"{pickled[0]} is a pickle, which can run code" if pickled else "it has none"
            raise InvalidField("path", path, f"weights come as .safetensors; {held}; convert it")
        return Source(str(place), None)
    if HUB_ID.fullmatch(path) and path.count("/") == 1:
        return Source(path, None)
    raise InvalidField("path", path, "there is no such file or folder; mind the spelling")


def load_model(config: TargetConfig, device: torch.device) -> Any:
    """The model in evaluation mode, with the paged attention chosen.

    Raises:
        InvalidField: an unknown path, an unsupported family, weights that are missing.
    """
    source = find(config.path)
    try:
        description = AutoConfig.from_pretrained(source.name, **source.options)
    except (OSError, ValueError) as error:
        raise _unreadable(config.path, error) from error
    check_family(description)
    extra: dict[str, Any] = {}
    if source.gguf is not None:
        extra["quantization_config"] = GgufConfig(dequantize=True)
    attention.register()
    loaded: Any  # the model and, because of output_loading_info, what was found of it
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source.name,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            **source.options,
            **extra,
        )
    except OSError as error:
        raise _unreadable(config.path, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidField(
            "path", config.path, f"{missing[0]} is missing from the weights; fetch them again"
        )
    return model.eval().to(device)


def check_family(description: Any) -> None:
    """Refuses what the packed forward pass was not made for.

    Raises:
        InvalidField: another family, or rotary embeddings that depend on the longest neighbour.
    """
    family = getattr(description, "model_type", None)
    if family not in FAMILIES:
        raise InvalidField("model_type", family, f"serve one of {', '.join(FAMILIES)}")
    rope = (getattr(description, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in MOVING_ROPES:
        raise InvalidField(
            "rope_type", rope, "frequencies must not depend on the length; use a fixed scaling"
        )


def load_tokenizer(path: str) -> Any | None:
    """The target's tokenizer, or None where the model comes without one."""
    source = find(path)
    place = Path(source.name)
    if source.gguf is None and place.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        if not any((place / name).is_file() for name in names):
            return None
    try:
        return AutoTokenizer.from_pretrained(source.name, **source.options)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> InvalidField:
    lines = str(error).strip().splitlines()
    return InvalidField("path", path, f"it cannot be read: {lines[0] if lines else error!r}")
