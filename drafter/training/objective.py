"""The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2), and its loss.

For a chat of n tokens row i = 0..n-2 is a chain that starts from the target's feature of
position i. Step s feeds it token i+1+s and asks for the law of token i+2+s. In step 0 the row
attends to the true features up to i; in step s it also attends to what its own chain produced
in steps 1..s, exactly as drafting does, and its feature is its own output of step s-1.

The loss of a step is a blend of cross-entropy with the target's law and of total variation,
which is what acceptance depends on: a draft is accepted with probability sum(min(p, q)).

B chats, T rows, H width, h / g heads, D head width, V' draft vocabulary, R rows with a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafter.head import Eagle3Head

TOTAL_VARIATION_SHARE = 0.5
_LOSS_ROWS = 128  # rows whose [rows, V'] float32 logits stay in the cache
STEP_DECAY = 0.9  # later draft positions matter less: they are reached less often


@dataclass(frozen=True)
class Batch:
    """Padded chats.

    tokens [B, T+1] int64; features [B, T+1, n*H]; hidden [B, T+1, H] (normalised last state);
    lengths [B] int64; prompts [B] int64.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor
    lengths: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class StepRows:
    """One unrolled step, restricted to the rows whose predicted token is part of the answer.

    rows [B, T] bool; hidden [R, H], the head's outputs; target_hidden [R, H], the lm_head's
    inputs at the predicting positions.
    """

    rows: Tensor
    hidden: Tensor
    target_hidden: Tensor


def unroll(
    head: Eagle3Head, embedding: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, steps: int
) -> Iterator[StepRows]:
    """Yields the unrolled steps 0..steps-1 of a batch.

    Args:
        embedding: the target's [V, H] table.
        rope: cos and sin [>= T + steps, D].
    """
    rows = batch.tokens.shape[1] - 1
    index = torch.arange(rows, device=batch.tokens.device)
    tokens = F.pad(batch.tokens, (0, steps))
    target_hidden = F.pad(batch.hidden, (0, 0, 0, steps))
    hidden = head.fc(batch.features[:, :-1])
    causal = torch.ones(rows, rows, dtype=torch.bool, device=index.device).tril()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        embeds = F.embedding(tokens[:, 1 + step : 1 + step + rows], embedding)
        cos, sin = rope[0][step : step + rows], rope[1][step : step + rows]
        q, k, v, residual = head.midlayer.before(embeds, hidden, cos, sin)
        keys.append(k)
        values.append(v)
        hidden = head.midlayer.after(_attend(q, keys, values, causal), residual)
        predicted = index + 2 + step  # [T]
        wanted = (predicted >= batch.prompts[:, None]) & (predicted < batch.lengths[:, None])
        yield StepRows(
            wanted,
            hidden[wanted],
            target_hidden[:, 1 + step : 1 + step + rows][wanted],
        )


def training_loss(
    head: Eagle3Head,
    embedding: Tensor,
    draft_rows: Tensor,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    steps: int,
) -> Tensor:
    """Mean loss of the unrolled steps, decayed; a float32 scalar.

    Args:
        draft_rows: [V', H], the target's lm_head rows of the draft vocabulary.
    """
    total = torch.zeros((), device=embedding.device)
    weight = 0.0
    for number, step in enumerate(unroll(head, embedding, rope, batch, steps)):
        if step.hidden.shape[0] == 0:
            continue
        loss: Tensor = _AcceptanceLoss.apply(  # type: ignore[no-untyped-call]
            head.norm(step.hidden), head.lm_head.weight, step.target_hidden, draft_rows
        )
        total = total + STEP_DECAY**number * loss
        weight += STEP_DECAY**number
    return total / max(weight, 1e-9)


class _AcceptanceLoss(torch.autograd.Function):
    """Blend of cross-entropy and total variation, fused with the lm_head that makes its logits.

    With q = softmax(z): d CE / dz = q - p, and d TV / dz_k = q_k (S - [q_k < p_k]) where
    S = sum of q over the ids with q < p. The gradients of hidden and weight are formed in the
    forward pass, a few rows at a time, so that no [R, V'] matrix ever leaves the cache.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor
    ) -> Tensor:
        rows, dtype = hidden.shape[0], target_weight.dtype
        low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(low_hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, rows, _LOSS_ROWS):
            h = low_hidden[start : start + _LOSS_ROWS]
            p = (target_hidden[start : start + _LOSS_ROWS].to(dtype) @ target_weight.T).float()
            p = p.softmax(-1)
            z = (h @ low_weight.T).float()
            value, gradient = _blend(z, p)
            total += value.double()
            gradient = (gradient / rows).to(dtype)
            grad_hidden[start : start + _LOSS_ROWS] = gradient @ low_weight
            grad_weight += gradient.T @ h
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight)
        return (total / rows).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None


def _blend(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Logits z and target p [R, V'] -> the summed loss and its gradient by z [R, V']."""
    share = TOTAL_VARIATION_SHARE
    log_norm = torch.logsumexp(z, -1, keepdim=True)
    q = (z - log_norm).exp_()
    below = (q < p).float()
    cross_entropy = log_norm.sum() - torch.dot(p.flatten(), z.flatten())
    mass_below = (q * below).sum(-1, keepdim=True)
    variation = z.shape[0] - mass_below.sum() - torch.dot(p.flatten(), 1 - below.flatten())
    gradient = torch.addcmul(q * (1 - share), q, mass_below - below, value=share)
    gradient.sub_(p, alpha=1 - share)
    return (1 - share) * cross_entropy + share * variation, gradient


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], causal: Tensor) -> Tensor:
    """q [B, T, h, D]; keys, values: one [B, T, g, D] a step so far -> [B, T, h*D]."""
    batch, rows, heads, width = q.shape
    group = heads // keys[0].shape[2]
    k = [key.repeat_interleave(group, 2).transpose(1, 2) for key in keys]  # [B, h, T, D]
    v = [value.repeat_interleave(group, 2).transpose(1, 2) for value in values]
    q = q.transpose(1, 2)
    if len(k) == 1:
        out = F.scaled_dot_product_attention(q, k[0], v[0], is_causal=True)
    else:
        scale = width**-0.5
        scores = (q @ k[0].transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~causal, float("-inf"))
        own = torch.stack([(q * key).sum(-1).float() * scale for key in k[1:]], -1)
        weights = torch.cat([scores, own], -1).softmax(-1).to(q.dtype)
        out = weights[..., :rows] @ v[0]
        for number, value in enumerate(v[1:]):
            out = out + weights[..., rows + number, None] * value
    return out.transpose(1, 2).reshape(batch, rows, heads * width)
