"""Trains an EAGLE-3 head for one target on one machine: resumable, validated, plotted."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from outrider.drafter.head import Eagle3Head, rope_tables
from outrider.drafter.head_config import HeadConfig
from outrider.drafter.training.corpus import Corpus
from outrider.drafter.training.objective import Batch, training_loss
from outrider.drafter.training.validation import Validation, validate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingPlan:
    """How to train.

    steps: optimiser steps; tokens_per_step; unroll: steps of the training-time test;
    learning_rate: peak, after a linear warm-up and before a cosine decay to a twentieth;
    validate_every, checkpoint_every: in steps; seed: of batch order.
    """

    steps: int = 2000
    tokens_per_step: int = 2048
    unroll: int = 3
    learning_rate: float = 1e-3
    warmup: int = 50
    validate_every: int = 200
    checkpoint_every: int = 50
    seed: int = 0


def draft_vocabulary(
    tokens: npt.NDArray[np.int32], answer: npt.NDArray[np.bool_], size: int
) -> Tensor:
    """The `size` target ids that answers use most, ascending, [V'] int64."""
    counts = Counter(tokens[answer].tolist())
    chosen = [token for token, _ in counts.most_common(size)]
    spare = (i for i in range(int(tokens.max()) + size + 1) if i not in counts)
    while len(chosen) < size:
        chosen.append(next(spare))
    return torch.tensor(sorted(chosen), dtype=torch.long)


def start_head(config: HeadConfig, target: Any, vocabulary: Tensor, seed: int) -> Eagle3Head:
    """A head that begins as close to the target as its shape allows.

    The lm_head and final norm are the target's, the fused feature begins as the highest layer,
    and where the sizes agree the layer begins as the target's last one, with a small random
    embedding half. Anything that does not fit keeps its random start.
    """
    torch.manual_seed(seed)
    head = Eagle3Head(config)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    head.t2d.zero_()
    head.t2d[vocabulary] = True
    size = config.hidden_size
    if size != config.target_hidden_size:
        return head
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary].float())
        head.norm.weight.copy_(target.base_model.norm.weight.float())
        head.fc.weight[:, -size:] += torch.eye(size)
        last, layer = target.base_model.layers[-1], head.midlayer
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight.float())
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight.float())
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            ours, theirs = getattr(layer.self_attn, name), getattr(last.self_attn, name)
            side = ours.weight[:, -theirs.weight.shape[1] :]
            if side.shape == theirs.weight.shape:
                side.copy_(theirs.weight.float())
        for name in ("gate_proj", "up_proj", "down_proj"):
            ours, theirs = getattr(layer.mlp, name), getattr(last.mlp, name)
            if ours.weight.shape == theirs.weight.shape:
                ours.weight.copy_(theirs.weight.float())
    return head


class Trainer:
    """Owns a head, its optimiser and its checkpoint folder."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        lm_head: Tensor,
        corpus: Corpus,
        held_out: Sequence[int],
        plan: TrainingPlan,
        folder: Path,
    ) -> None:
        """
        Args:
            embedding, lm_head: the target's [V, H] tables.
            held_out: chats used for validation alone.
            folder: where checkpoint.pt and log.jsonl go.
        """
        self.head = head
        self.plan = plan
        self.folder = folder
        self.corpus = corpus
        self.embedding = embedding.to(torch.bfloat16)
        self.lm_head = lm_head.to(torch.bfloat16)
        self.draft_rows = self.lm_head[head.target_ids()].clone()
        longest = int(corpus.lengths().max())
        self.rope = rope_tables(head.config, longest + plan.unroll)
        self.held_out = list(held_out)
        kept = set(self.held_out)
        self.training = [i for i in range(len(corpus)) if i not in kept]
        decayed = [p for p in head.parameters() if p.dim() > 1]
        plain = [p for p in head.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
        )
        self.step = 0
        self.epoch = -1
        self.epoch_end = 0  # the step at which the epoch's batches are used up
        self.epoch_batches: list[list[int]] = []

    def resume(self) -> bool:
        """Continues from the folder's checkpoint, if there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        log.info("resumed at step %d", self.step)
        return True

    def run(self) -> Validation:
        """Trains to the planned step, then validates once more."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = self.plan
        with tqdm(total=plan.steps, initial=self.step, desc="train", mininterval=5) as bar:
            while self.step < plan.steps:
                loss = self._update()
                self.step += 1
                bar.set_postfix(loss=f"{loss:.3f}")
                bar.update()
                self._record({"step": self.step, "loss": loss, "lr": self._learning_rate()})
                if self.step % plan.validate_every == 0 and self.step < plan.steps:
                    self._record(asdict(self.validate()))
                if self.step % plan.checkpoint_every == 0:
                    self.save()
        self.save()
        result = self.validate()
        self._record(asdict(result))
        return result

    def save(self) -> None:
        """Writes the checkpoint, replacing the last one whole."""
        path = self.folder / "checkpoint.pt"
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def validate(self) -> Validation:
        """Quality on the held-out chats."""
        result = validate(
            self.head,
            self.embedding,
            self.lm_head,
            self.rope,
            (self._batch(self.held_out[i : i + 4]) for i in range(0, len(self.held_out), 4)),
            self.plan.unroll,
            self.step,
        )
        log.info(
            "step %d: expected acceptance length for K=1..%d at temperature 0: %s, at 1: %s",
            self.step,
            self.plan.unroll,
            " ".join(f"{x:.2f}" for x in result.acceptance_length_t0),
            " ".join(f"{x:.2f}" for x in result.acceptance_length_t1),
        )
        return result

    def _update(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        batch = self._batch(self._next_batch())
        with torch.autocast("cpu", torch.bfloat16):
            loss = training_loss(
                self.head, self.embedding, self.draft_rows, self.rope, batch, self.plan.unroll
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.item())

    def _learning_rate(self) -> float:
        plan = self.plan
        if self.step < plan.warmup:
            return plan.learning_rate * (self.step + 1) / plan.warmup
        share = min(1.0, (self.step - plan.warmup) / max(1, plan.steps - plan.warmup))
        return plan.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))

    def _next_batch(self) -> list[int]:
        """The batch of this step: a pure function of the seed and the step, so resuming repeats
        nothing. Every epoch is used whole."""
        while self.step >= self.epoch_end:
            self.epoch += 1
            self.epoch_batches = self._epoch(self.epoch)
            self.epoch_end += len(self.epoch_batches)
        return self.epoch_batches[self.step - self.epoch_end]  # counted from the epoch's end

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Chats of like length share a batch (little padding); batches come in random order."""
        rng = np.random.default_rng((self.plan.seed, epoch))
        lengths = self.corpus.lengths()
        order = sorted(self.training, key=lambda i: int(lengths[i]) + rng.integers(0, 32))
        batches: list[list[int]] = [[]]
        size = 0
        for chat in order:
            if size + lengths[chat] > self.plan.tokens_per_step and batches[-1]:
                batches.append([])
                size = 0
            batches[-1].append(chat)
            size += int(lengths[chat])
        rng.shuffle(batches)
        return batches

    def _batch(self, chats: Sequence[int]) -> Batch:
        corpus = self.corpus
        lengths = corpus.lengths()[list(chats)]
        longest = int(lengths.max())
        tokens = torch.zeros(len(chats), longest, dtype=torch.long)
        features = torch.zeros(len(chats), longest, corpus.features.shape[1], dtype=torch.bfloat16)
        hidden = torch.zeros(len(chats), longest, corpus.hidden.shape[1], dtype=torch.bfloat16)
        for row, (chat, n) in enumerate(zip(chats, lengths, strict=True)):
            span = slice(int(corpus.offsets[chat]), int(corpus.offsets[chat]) + int(n))
            tokens[row, :n] = torch.from_numpy(corpus.tokens[span].astype(np.int64))
            features[row, :n] = torch.from_numpy(corpus.features[span].copy()).view(torch.bfloat16)
            hidden[row, :n] = torch.from_numpy(corpus.hidden[span].copy()).view(torch.bfloat16)
        prompts = torch.from_numpy(corpus.prompts[list(chats)])
        return Batch(tokens, features, hidden, torch.from_numpy(lengths), prompts)

    def _record(self, entry: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
