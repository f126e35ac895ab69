"""The target's embedding table, read from its files without loading the target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.drafter.head_config import HeadError

_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")


def read_embedding(target: Path, dtype: torch.dtype) -> Tensor:
    """[V, H] table of a target given as a folder of safetensors or as a GGUF file.

    Raises:
        HeadError: no such table there.
    """
    if target.suffix == ".gguf":
        return _from_gguf(target).to(dtype)
    index = target / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name in _NAMES:
            if name in places:
                return _from_safetensors(target / places[name], name).to(dtype)
    single = target / "model.safetensors"
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            present = set(file.keys())
        for name in _NAMES:
            if name in present:
                return _from_safetensors(single, name).to(dtype)
    raise HeadError(
        f"target: no embedding table found in {target}; give a folder with model.safetensors "
        "(or its index) or a .gguf file"
    )


def _from_safetensors(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _from_gguf(path: Path) -> Tensor:
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(path).tensors:
        if tensor.name == "token_embd.weight":
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    raise HeadError(f"target: {path} holds no token_embd.weight")
