"""The EAGLE-3 proposer: verdicts in, drafts out.

Every verdict first brings the head's cache up to the committed text with the target's true
features; then K tokens are drafted, each sampled from the very law that is shipped.
B requests, T rows, H width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafter.assembly import DraftedStep, assemble
from outrider.drafter.head import Eagle3Head, rope_tables
from outrider.drafter.head_config import HeadError
from outrider.drafter.kv_cache import CacheFull, HeadCache, Sequence
from outrider.drafter.packed_linear import pack_linears
from outrider.kernels.dispatch import sampler_for
from outrider.kernels.rejection import DrawKeys, RowParameters
from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftSettings:
    """How to draft.

    tail: probability mass a support may leave out; max_support: entries it may hold;
    cache_blocks x block_size: rows of the head's cache; max_requests: requests open at once.
    """

    tail: float = 0.01
    max_support: int = 240
    cache_blocks: int = 1024
    block_size: int = 32
    max_requests: int = 256

    def __post_init__(self) -> None:
        if not 0.0 <= self.tail < 1.0:
            raise HeadError(f"tail: {self.tail} must lie in [0, 1)")
        for name in ("max_support", "cache_blocks", "block_size", "max_requests"):
            if getattr(self, name) < 1:
                raise HeadError(f"{name}: {getattr(self, name)} must be at least 1")


@dataclass
class _Request:
    """One open request; `sequence.length` rows of true features are cached."""

    open: RequestOpen
    sequence: Sequence
    lost: bool = False  # a gap in its verdicts: it cannot be drafted for any more


@dataclass(frozen=True)
class _Turn:
    """What one request does in a call: rows of the verdict, and how many tokens to draft."""

    request: _Request
    base: int
    rows: slice
    drafts: int

    @property
    def count(self) -> int:
        """Rows of true features."""
        return int(self.rows.stop - self.rows.start)

    @property
    def committed(self) -> int:
        """Tokens committed once this verdict is applied."""
        return self.base + self.count + 1


class Eagle3Drafter:
    """Owns a head, its cache and the requests open on it. Not safe for two threads at once."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        settings: DraftSettings,
        device: torch.device,
        head_version: int = 1,
        service: str = "outrider",
        sender: str = "drafter/0",
    ) -> None:
        """
        Args:
            embedding: the target's [V, H] table.

        Raises:
            HeadError: the head does not fit the target's table.
        """
        config = head.config
        if embedding.shape[0] < config.vocab_size or embedding.shape[1] != config.hidden_size:
            raise HeadError(
                f"head: made for vocabulary {config.vocab_size} and hidden size "
                f"{config.hidden_size}, but the target's embedding is "
                f"{embedding.shape[0]} x {embedding.shape[1]}; use a head trained for this target"
            )
        self.head = head.to(device)
        self.fusion = head.fc.weight.detach().to(torch.bfloat16).cpu().contiguous()
        self.dtype = self.head.fc.weight.dtype
        if device.type == "cpu":
            pack_linears(self.head)
        self.config = config
        self.settings = settings
        self.device = device
        self.embedding = embedding.to(device=device, dtype=self.dtype)
        self.rope = rope_tables(config, config.max_position_embeddings, device)
        self.d2t = head.target_ids() if config.reduced else None
        self.cache = HeadCache(
            settings.cache_blocks,
            settings.block_size,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            device,
        )
        self.sampler = sampler_for(device)
        self.requests: dict[int, _Request] = {}
        self.head_version = head_version
        self.service = service
        self.sender = sender

    def feature_spec(self) -> FeatureSpec:
        """What the verifier must compute for this head: its layers, fused by `fc`."""
        return FeatureSpec(
            layers=self.config.feature_layers,
            hidden_size=self.config.target_hidden_size,
            head_version=self.head_version,
            norm=None,
            projection=self.fusion.view(torch.uint16).numpy(),
        )

    def open(self, request: RequestOpen) -> None:
        """Begins a request; one that is open under an older epoch is begun anew."""
        known = self.requests.get(request.request_id)
        if known is not None:
            if known.open.epoch >= request.epoch:
                return
            self.cache.release(known.sequence)
        elif len(self.requests) >= self.settings.max_requests:
            log.warning(
                "request %d is not drafted: %d are open", request.request_id, len(self.requests)
            )
            return
        self.requests[request.request_id] = _Request(request, Sequence())

    def close(self, request: RequestClose) -> None:
        """Ends a request and frees its cache; unknown or newer ones are left alone."""
        known = self.requests.get(request.request_id)
        if known is not None and known.open.epoch <= request.epoch:
            self.cache.release(known.sequence)
            del self.requests[request.request_id]

    @torch.inference_mode()
    def propose(self, verdicts: VerdictBatch) -> DraftBatch:
        """Catches up with the verdicts and drafts `num_to_draft` tokens for each request."""
        turns = self._turns(verdicts)
        drafting: list[_Turn] = []
        steps: list[DraftedStep] = []
        if turns:
            hidden = self._catch_up(turns, verdicts)  # [B, H]
            chosen = [i for i, turn in enumerate(turns) if turn.drafts > 0]
            drafting = [turns[i] for i in chosen]
            if drafting:
                steps = self._draft(drafting, hidden[chosen])
        return assemble(
            steps,
            request_ids=[t.request.open.request_id for t in drafting],
            epochs=[t.request.open.epoch for t in drafting],
            base_lengths=[t.committed for t in drafting],
            last_token_ids=[int(verdicts.token_ids[t.rows.stop - 1]) for t in drafting],
            wide_ids=self.config.vocab_size > 1 << 16,
            service=self.service,
            sender=self.sender,
            round_number=verdicts.round,
            target_version=verdicts.target_version,
            head_version=self.head_version,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when cache books do not balance."""
        self.cache.check_integrity([r.sequence for r in self.requests.values()])

    def _turns(self, verdicts: VerdictBatch) -> list[_Turn]:
        turns: list[_Turn] = []
        for b, request_id in enumerate(verdicts.request_ids.tolist()):
            request = self.requests.get(request_id)
            if request is None or request.lost or request.open.epoch != verdicts.epochs[b]:
                continue
            base = int(verdicts.base_lengths[b])
            rows = slice(int(verdicts.cu_tokens[b]), int(verdicts.cu_tokens[b + 1]))
            end = base + rows.stop - rows.start
            drafts = min(int(verdicts.num_to_draft[b]), self.config.max_position_embeddings - end)
            if base > request.sequence.length or rows.start == rows.stop or drafts < 0:
                self._lose(request)
                continue
            try:
                self.cache.reserve(request.sequence, end + max(drafts - 1, 0))
            except CacheFull as error:
                log.warning("request %d is no longer drafted: %s", request_id, error)
                self._lose(request)
                continue
            turns.append(_Turn(request, base, rows, drafts))
        return turns

    def _lose(self, request: _Request) -> None:
        request.lost = True
        self.cache.release(request.sequence)

    def _catch_up(self, turns: list[_Turn], verdicts: VerdictBatch) -> Tensor:
        """Runs the head over all true rows; returns the last row's output per turn [B, H]."""
        rows = np.concatenate([np.arange(t.rows.start, t.rows.stop) for t in turns])
        raw = torch.from_numpy(np.ascontiguousarray(verdicts.features[rows]))
        features = raw.view(torch.bfloat16) if raw.dtype == torch.uint16 else raw
        tokens = torch.from_numpy(verdicts.token_ids[rows].astype(np.int64))
        counts = [t.count for t in turns]
        hidden = self._forward(
            features.to(self.device, self.dtype),
            tokens.to(self.device),
            [t.request.sequence for t in turns],
            [t.base for t in turns],
            counts,
        )
        for turn, count in zip(turns, counts, strict=True):
            turn.request.sequence.length = turn.base + count
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        return hidden[last]

    def _draft(self, turns: list[_Turn], hidden: Tensor) -> list[DraftedStep]:
        """Drafts step by step; step j holds the turns that want more than j tokens."""
        steps: list[DraftedStep] = []
        active = list(range(len(turns)))
        for step in range(max(turn.drafts for turn in turns)):
            chosen = [turns[a] for a in active]
            packed = self.sampler.draft_and_pack(
                self.head.logits(hidden),
                _parameters(chosen, self.device),
                _keys(chosen, step, self.device),
                self.d2t,
                tail=self.settings.tail,
                max_support=self.settings.max_support,
            )
            steps.append(DraftedStep(tuple(active), packed))
            ended = packed.failed.tolist()
            onward = [i for i, t in enumerate(chosen) if t.drafts > step + 1 and not ended[i]]
            if not onward:
                break
            active = [active[i] for i in onward]
            hidden = self._forward(
                hidden[onward],
                packed.token_ids[onward].long(),
                [turns[a].request.sequence for a in active],
                [turns[a].committed - 1 + step for a in active],
                [1] * len(active),
            )
        return steps

    def _forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        sequences: list[Sequence],
        starts: list[int],
        counts: list[int],
    ) -> Tensor:
        """hidden [T, H] and tokens [T] of ragged rows -> the layer's outputs [T, H]."""
        layout = self.cache.layout(sequences, starts, counts)
        positions = torch.cat(
            [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        ).to(self.device)
        layer = self.head.midlayer
        q, k, v, residual = layer.before(
            F.embedding(tokens, self.embedding),
            hidden,
            self.rope[0][positions],
            self.rope[1][positions],
        )
        out: Tensor = layer.after(self.cache.attend(q, k, v, layout), residual)
        return out


def _parameters(turns: list[_Turn], device: torch.device) -> RowParameters:
    wanted = [turn.request.open.parameters for turn in turns]
    return RowParameters(
        temperature=torch.tensor([p.temperature for p in wanted], device=device),
        top_k=torch.tensor([p.top_k for p in wanted], dtype=torch.int32, device=device),
        top_p=torch.tensor([p.top_p for p in wanted], device=device),
        min_p=torch.tensor([p.min_p for p in wanted], device=device),
    )


def _keys(turns: list[_Turn], step: int, device: torch.device) -> DrawKeys:
    opened = [turn.request.open for turn in turns]
    committed = [turn.committed for turn in turns]
    return DrawKeys(
        seeds=torch.from_numpy(np.array([o.seed for o in opened], np.uint64).view(np.int64)).to(
            device
        ),
        sample_indices=torch.tensor(
            [o.sample_index for o in opened], dtype=torch.int32, device=device
        ),
        base_lengths=torch.tensor(committed, dtype=torch.int32, device=device),
        positions=torch.tensor([c + step for c in committed], dtype=torch.int32, device=device),
    )
