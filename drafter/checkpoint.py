"""EAGLE-3 heads on disk: a folder with `config.json` and weights, as vLLM and SGLang read them.

Nothing is ever left at its random start: a tensor that is missing, left over or of another shape
is an error that names it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafter.head import Eagle3Head
from outrider.drafter.head_config import HeadError, head_config_json, read_head_config

_VOCABULARY_MAPS = ("d2t", "t2d")


def load_head(folder: Path, num_target_layers: int | None, dtype: torch.dtype) -> Eagle3Head:
    """Loads a head and proves that it is whole.

    Raises:
        HeadError: names the tensor or field and what is wrong with it.
    """
    config = read_head_config(folder, num_target_layers)
    tensors = _read_tensors(folder)
    tensors.pop("embed_tokens.weight", None)  # the target's table is used: same ids, one copy
    tensors.pop("model.embed_tokens.weight", None)
    with torch.device("meta"):
        head = Eagle3Head(config)
    expected = head.state_dict()
    if not config.reduced:
        for name in _VOCABULARY_MAPS:
            expected.pop(name)
            tensors.pop(name, None)
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected))
    if missing:
        raise HeadError(
            f"head: {folder} lacks {', '.join(missing)}; it is not a whole EAGLE-3 head"
        )
    if unexpected:
        raise HeadError(f"head: {folder} has {', '.join(unexpected)}, unknown to an EAGLE-3 head")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise HeadError(
                f"{name}: shape {list(tensor.shape)} where config.json implies "
                f"{list(expected[name].shape)}"
            )
    head = head.to_empty(device="cpu")
    if config.reduced:
        check_vocabulary_maps(tensors["d2t"], tensors["t2d"])
    else:
        head.d2t.zero_()
        head.t2d.fill_(True)
    head.load_state_dict(tensors, strict=config.reduced)
    return head.to(dtype).eval()


def check_vocabulary_maps(d2t: Tensor, t2d: Tensor) -> None:
    """d2t [V'] offsets and t2d [V] marks must describe the same strictly increasing ids.

    Raises:
        HeadError: which of the two is wrong and how.
    """
    if d2t.dtype not in (torch.int64, torch.int32):
        raise HeadError(f"d2t: dtype {d2t.dtype}; offsets are int64")
    if t2d.dtype != torch.bool:
        raise HeadError(f"t2d: dtype {t2d.dtype}; marks are bool")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= len(t2d):
        raise HeadError(
            f"d2t: ids reach {int(ids.min())}..{int(ids.max())}, outside the vocabulary of "
            f"{len(t2d)}; entry i must be target id minus i"
        )
    if bool((ids.diff() <= 0).any()):
        raise HeadError("d2t: target ids must be strictly increasing; entry i is target id minus i")
    if int(t2d.sum()) != len(d2t) or not bool(t2d[ids].all()):
        raise HeadError(
            f"t2d: marks {int(t2d.sum())} ids that are not the {len(d2t)} ids of d2t; "
            "the two maps come from different training runs"
        )


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous()
        for name, t in head.state_dict().items()
    }
    if not head.config.reduced:
        for name in _VOCABULARY_MAPS:
            tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(head_config_json(head.config), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        merged: dict[str, Tensor] = {}
        for name in files:
            merged.update(load_file(folder / name))
        return merged
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        tensors: dict[str, Tensor] = torch.load(
            folder / "pytorch_model.bin", map_location="cpu", weights_only=True
        )
        return tensors
    raise HeadError(
        f"head: no weights in {folder}; expected model.safetensors, its index, or pytorch_model.bin"
    )
