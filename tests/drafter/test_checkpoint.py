"""Heads on disk: whole, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafter.checkpoint import check_vocabulary_maps, load_head, save_head
from outrider.drafter.eagle import DraftSettings, Eagle3Drafter
from outrider.drafter.embedding import read_embedding
from outrider.drafter.head_config import HeadError, default_feature_layers, parse_head_config
from tests.drafter.heads import tiny_head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tiny_head(), tmp_path / "eagle-1")
    return tmp_path / "eagle-1"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path):
    return load_head(folder, 8, torch.float32)


def test_round_trip_keeps_every_tensor(folder: Path) -> None:
    head, again = tiny_head(), load(folder)
    for name, tensor in head.state_dict().items():
        expected = tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        assert torch.equal(again.state_dict()[name], expected), name


def test_names_are_those_of_published_heads(folder: Path) -> None:
    assert set(load_file(folder / "model.safetensors")) == {
        "d2t",
        "fc.weight",
        "lm_head.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.mlp.down_proj.weight",
        "midlayer.mlp.gate_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.post_attention_layernorm.weight",
        "midlayer.self_attn.k_proj.weight",
        "midlayer.self_attn.o_proj.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.v_proj.weight",
        "norm.weight",
        "t2d",
    }


@pytest.mark.parametrize("name", sorted(tiny_head().state_dict()))
def test_h3_each_missing_tensor_is_named(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(HeadError, match=name.replace(".", r"\.")):
        load(folder)


def test_h1_bias_without_a_place_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"fc.bias": torch.zeros(32)}))
    with pytest.raises(HeadError, match=r"fc\.bias"):
        load(folder)


def test_wrong_shape_names_tensor_and_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(31)}))
    with pytest.raises(HeadError, match=r"norm\.weight: shape \[31\].*\[32\]"):
        load(folder)


GOOD_D2T = torch.tensor([1, 1, 2])  # ids 1, 2, 4
GOOD_T2D = torch.tensor([False, True, True, False, True])


def test_h5_valid_maps_pass() -> None:
    check_vocabulary_maps(GOOD_D2T, GOOD_T2D)


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        ([0, 0, 0], [False, True, True, False, True]),  # all zero: ids 0..N-1
        ([1, 2, 4], [False, True, True, False, True]),  # absolute ids where offsets belong
        ([1, 0, 2], [False, True, True, False, True]),  # a duplicate
        ([1, 1, 9], [False, True, True, False, True]),  # out of range
        ([-1, 1, 2], [False, True, True, False, True]),  # negative
        ([1, 1, 2], [True, True, True, False, True]),  # marks of another run
        ([1, 1], [False, True, True, False, True]),  # wrong length
    ],
)
def test_h5_inconsistent_maps_are_refused(d2t: list[int], t2d: list[bool]) -> None:
    with pytest.raises(HeadError, match=r"d2t|t2d"):
        check_vocabulary_maps(torch.tensor(d2t), torch.tensor(t2d))


def test_h7_both_layer_conventions_mean_the_same(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    flat = {k: v for k, v in raw.items() if k != "eagle_config"}
    nested = {k: v for k, v in raw.items() if k != "eagle_aux_hidden_state_layer_ids"}
    assert parse_head_config(flat).feature_layers == (2, 4, 5)
    assert nested["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert parse_head_config(nested).feature_layers == (2, 4, 5)


def test_h7_shallow_target_is_a_clear_error() -> None:
    assert default_feature_layers(8) == (2, 4, 5)
    assert default_feature_layers(30) == (2, 15, 27)
    with pytest.raises(HeadError, match="3 layers"):
        default_feature_layers(3)


def test_h11_pickled_and_sharded_weights_load_alike(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    expected = load(folder).state_dict()
    pickled, sharded = tmp_path / "bin", tmp_path / "shards"
    for other in (pickled, sharded):
        other.mkdir()
        (other / "config.json").write_text((folder / "config.json").read_text())
    torch.save(tensors, pickled / "pytorch_model.bin")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, sharded / file)
    places = {n: file for file, held in parts.items() for n in held}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for other in (pickled, sharded):
        for name, tensor in load(other).state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_pickle_that_runs_code_is_refused(folder: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (Path(tmp_path / "touched"),))

    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load(folder)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("shape", [(60, 32), (64, 40)])
def test_head_of_another_target_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(HeadError, match=f"{shape[0]} x {shape[1]}"):
        Eagle3Drafter(tiny_head(), torch.zeros(*shape), DraftSettings(), torch.device("cpu"))


def test_missing_folder_and_missing_field_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(HeadError, match=r"no .*config\.json"):
        load(tmp_path / "nowhere")
    raw = json.loads((folder / "config.json").read_text())
    del raw["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HeadError, match="intermediate_size: missing"):
        load(folder)


def test_embedding_is_read_without_the_target(tmp_path: Path) -> None:
    table = torch.randn(61, 32)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    assert torch.equal(read_embedding(tmp_path, torch.float32), table)
    with pytest.raises(HeadError, match="no embedding table"):
        read_embedding(tmp_path / "missing", torch.float32)
