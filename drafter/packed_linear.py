"""Linear layers with weights packed once for oneDNN, for bfloat16 on the CPU.

A plain bfloat16 product of a few rows re-orders the whole weight every time; packed beforehand
it runs twice as fast and gives the same bits. On other devices and types nothing changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FEW_ROWS = 4  # the packing is made for draft steps, not for long catch-ups


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` at inference; x [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _FEW_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replaces the bfloat16 linear layers below `module`, where the processor can run them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))
