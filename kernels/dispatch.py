"""Which implementation of the sampler serves a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.draft_sampling import (
    DEFAULT_MAX_SUPPORT,
    DEFAULT_TAIL,
    PackedDraft,
    draft_and_pack,
)
from outrider.kernels.rejection import (
    DraftTokens,
    DrawKeys,
    RowParameters,
    Verification,
    verify_rejection,
)

DEVICES = ("cpu", "cuda")
METHODS = ("rejection",)


class Sampler(Protocol):
    """The two halves of lossless speculation, on one device."""

    @property
    def name(self) -> str:
        """What serves, for people to read."""
        ...

    def draft_and_pack(
        self,
        logits: Tensor,
        parameters: RowParameters,
        keys: DrawKeys,
        d2t: Tensor | None = None,
        tail: float = DEFAULT_TAIL,
        max_support: int = DEFAULT_MAX_SUPPORT,
        vocab_size: int | None = None,
    ) -> PackedDraft: ...

    def verify(
        self,
        logits: Tensor,
        drafts: DraftTokens,
        parameters: RowParameters,
        keys: DrawKeys,
        vocab_size: int,
    ) -> Verification: ...


@dataclass(frozen=True)
class TorchSampler:
    """Plain torch operations; they serve every device."""

    name: str = "torch"

    def draft_and_pack(
        self,
        logits: Tensor,
        parameters: RowParameters,
        keys: DrawKeys,
        d2t: Tensor | None = None,
        tail: float = DEFAULT_TAIL,
        max_support: int = DEFAULT_MAX_SUPPORT,
        vocab_size: int | None = None,
    ) -> PackedDraft:
        return draft_and_pack(logits, parameters, keys, d2t, tail, max_support, vocab_size)

    def verify(
        self,
        logits: Tensor,
        drafts: DraftTokens,
        parameters: RowParameters,
        keys: DrawKeys,
        vocab_size: int,
    ) -> Verification:
        return verify_rejection(logits, drafts, parameters, keys, vocab_size)


def sampler_for(device: torch.device | str, method: str = "rejection") -> Sampler:
    """The sampler of a device and a verification method.

    Greedy requests are verified by equality under every method.
    """
    kind = torch.device(device).type
    if kind not in DEVICES:
        raise ValueError(f"device: {str(device)!r} is not usable; choose one of {DEVICES}")
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not served; choose one of {METHODS}")
    return TorchSampler()
