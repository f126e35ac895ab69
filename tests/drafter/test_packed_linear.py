"""Packed weights must not change a single bit of a draft."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.drafter.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_packed_products_equal_plain_ones_bit_for_bit(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=False).to(torch.bfloat16)
    model = nn.Sequential(linear)
    x = torch.randn(rows, 64).to(torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        pack_linears(model)
        assert torch.equal(model(x), expected)


def test_float32_layers_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    pack_linears(model)
    assert not isinstance(model[0], PackedLinear)
