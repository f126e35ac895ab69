"""The target's hidden states as a head wants them.

Axes: T packed rows, S rows that are sent, W the width of a hidden state, H of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.protos.messages import FeatureSpec


class FeatureExtractor:
    """Concatenates, normalises and projects the layers that a FeatureSpec names."""

    def __init__(
        self, spec: FeatureSpec, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.layers = frozenset(spec.layers)
        self._eps = eps
        self._norms: list[Tensor] | None = None
        self._projection: Tensor | None = None
        if spec.norm is not None:
            rows = np.broadcast_to(spec.norm, (len(spec.layers), spec.hidden_size))
            self._norms = list(from_array(rows).to(device=device, dtype=dtype))
        if spec.projection is not None:
            self._projection = from_array(spec.projection).to(device=device, dtype=dtype)

    def rows(self, states: Mapping[int, Tensor], index: Tensor) -> Any:
        """The features of some rows.

        Args:
            states: by layer, [T, W]; index: [S].

        Returns:
            float32 [S, H], or the uint16 view of bfloat16.
        """
        parts = [states[layer].index_select(0, index) for layer in self.spec.layers]
        if self._norms is not None:
            parts = [
                F.rms_norm(part, (part.shape[1],), norm, self._eps)
                for part, norm in zip(parts, self._norms, strict=True)
            ]
        joined = torch.cat(parts, dim=1)
        if self._projection is not None:
            joined = joined @ self._projection.T
        return to_array(joined)


def from_array(array: Any) -> Tensor:
    """A tensor of its own; uint16 is read as bfloat16."""
    held = np.array(array)
    if held.dtype == np.uint16:
        return torch.from_numpy(held.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(held)


def to_array(tensor: Tensor) -> Any:
    """The other way round: float32, or bfloat16 as uint16."""
    held = tensor.detach().cpu().contiguous()
    if held.dtype == torch.bfloat16:
        return held.view(torch.int16).numpy().view(np.uint16)
    return held.to(torch.float32).numpy()
