"""The one place that decides where tensors live."""

from __future__ import annotations

import torch


def own_device() -> torch.device:
    """`cuda:0` iff this process sees a GPU (Ray shows an actor those it granted), else `cpu`."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
