"""The seam between the engine and the kernels: one sampler a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels import draft_sampling, rejection
from outrider.kernels.draft_sampling import PackedDraft
from outrider.kernels.rejection import DraftTokens, DrawKeys, RowParameters, Verification

METHODS = ("rejection",)
_DEVICES = ("cpu", "cuda")


class Sampler(Protocol):
    """Draft sampling and verification on one kind of device."""

    name: str

    def draft_and_pack(
        self,
        logits: Tensor,
        parameters: RowParameters,
        keys: DrawKeys,
        d2t: Tensor | None,
        *,
        tail: float,
        max_support: int,
    ) -> PackedDraft: ...

    def verify(
        self,
        logits: Tensor,
        drafts: DraftTokens,
        parameters: RowParameters,
        keys: DrawKeys,
        vocab_size: int,
    ) -> Verification: ...


class TorchSampler:
    """Plain torch: every device, and the reference that kernels are compared with."""

    name = "torch"

    def draft_and_pack(
        self,
        logits: Tensor,
        parameters: RowParameters,
        keys: DrawKeys,
        d2t: Tensor | None,
        *,
        tail: float,
        max_support: int,
    ) -> PackedDraft:
        return draft_sampling.draft_and_pack(
            logits, parameters, keys, d2t, tail=tail, max_support=max_support
        )

    def verify(
        self,
        logits: Tensor,
        drafts: DraftTokens,
        parameters: RowParameters,
        keys: DrawKeys,
        vocab_size: int,
    ) -> Verification:
        return rejection.verify_rejection(logits, drafts, parameters, keys, vocab_size)


def sampler_for(device: torch.device, method: str = "rejection") -> Sampler:
    """The sampler that serves a device.

    Raises:
        ValueError: a kind of device that nothing here was tested on, or an unknown method.
    """
    if device.type not in _DEVICES:
        raise ValueError(f"device: {device} is not supported; use one of {', '.join(_DEVICES)}")
    if method not in METHODS:
        raise ValueError(f"acceptance: {method!r} is not available; choose {', '.join(METHODS)}")
    return TorchSampler()
