"""Scripted drafters: links that follow the committed text and draft what a function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)
from outrider.verifier.link import Batch, no_drafts

Script = Callable[[RequestOpen, list[int], int], Sequence[int]]


@dataclass
class Life:
    """A request in one of its lives: what was opened, and the text that is committed."""

    opened: RequestOpen
    text: list[int]
    known: int = 0  # rows of features received


@dataclass
class ScriptedLink:
    """Drafts `script(opened, committed text, wanted)`, one-hot, and records what it is sent.

    change: applied to every batch before it is collected, to inject faults.
    """

    script: Script
    change: Callable[[DraftBatch], DraftBatch] = lambda batch: batch
    lives: dict[int, Life] = field(default_factory=dict)
    verdicts: list[VerdictBatch] = field(default_factory=list)
    waiting: list[DraftBatch] = field(default_factory=list)
    spec: FeatureSpec | None = field(
        default_factory=lambda: FeatureSpec((2, 4, 5), 32, 1, None, None)
    )

    def open(self, request: RequestOpen) -> None:
        request.validate()
        text = [*request.prompt_ids.tolist(), *request.output_ids.tolist()]
        self.lives[request.request_id] = Life(request, text)

    def close(self, request: RequestClose) -> None:
        life = self.lives.get(request.request_id)
        if life is not None and life.opened.epoch == request.epoch:
            del self.lives[request.request_id]

    def send(self, verdicts: VerdictBatch) -> None:
        verdicts.validate()
        self.verdicts.append(verdicts)
        for row in range(len(verdicts.request_ids)):
            life = self.lives[int(verdicts.request_ids[row])]
            base = int(verdicts.base_lengths[row])
            span = slice(int(verdicts.cu_tokens[row]), int(verdicts.cu_tokens[row + 1]))
            tokens = verdicts.token_ids[span].tolist()
            assert base <= life.known, "a gap in the features"
            life.known = base + len(tokens)
            life.text[base + 1 :] = tokens + life.text[base + 1 + len(tokens) :]
            wanted = int(verdicts.num_to_draft[row])
            if wanted:
                assert life.known == len(life.text) - 1, "rows are not in step with the text"
                drafts = list(self.script(life.opened, life.text, wanted))
                self.waiting.append(one_draft(life.opened, life.text, drafts))

    def collect(self, wanted: Batch, deadline: float) -> DraftBatch:
        batches, self.waiting = self.waiting, []
        return self.change(joined(batches)) if batches else no_drafts()

    def take_feature_spec(self) -> FeatureSpec | None:
        spec, self.spec = self.spec, None
        return spec

    def close_link(self) -> None:
        self.lives.clear()


def one_draft(opened: RequestOpen, text: Sequence[int], drafts: Sequence[int]) -> DraftBatch:
    """A deterministic chain for a request's committed text."""
    count = len(drafts)
    return replace(
        no_drafts(),
        request_ids=np.array([opened.request_id], np.int64),
        epochs=np.array([opened.epoch], np.int32),
        base_lengths=np.array([len(text)], np.int32),
        last_token_ids=np.array([text[-1]], np.int32),
        cu_num_draft_tokens=np.array([0, count], np.int32),
        token_ids=np.array(drafts, np.int32),
        parents=np.arange(-1, count - 1, dtype=np.int32),
        cu_support=np.zeros(count + 1, np.int32),
    )


def joined(batches: Sequence[DraftBatch]) -> DraftBatch:
    """One batch of several deterministic ones."""
    return replace(
        batches[0],
        request_ids=np.concatenate([b.request_ids for b in batches]),
        epochs=np.concatenate([b.epochs for b in batches]),
        base_lengths=np.concatenate([b.base_lengths for b in batches]),
        last_token_ids=np.concatenate([b.last_token_ids for b in batches]),
        cu_num_draft_tokens=np.concatenate(
            [[0], np.cumsum([len(b.token_ids) for b in batches])]
        ).astype(np.int32),
        token_ids=np.concatenate([b.token_ids for b in batches]),
        parents=np.concatenate([b.parents for b in batches]),
        cu_support=np.zeros(sum(len(b.token_ids) for b in batches) + 1, np.int32),
    )


def oracle(references: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """Drafts what the target will say, from its own greedy answers."""

    def script(opened: RequestOpen, text: list[int], wanted: int) -> Sequence[int]:
        prompt = tuple(opened.prompt_ids.tolist())
        done = len(text) - len(prompt)
        return references[prompt][done : done + wanted]

    return script


def adversary(references: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """Drafts anything but what the target will say."""
    right = oracle(references)
    return lambda opened, text, wanted: [(t + 7) % 61 for t in right(opened, text, wanted)]


def short(references: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """Drafts one token fewer than it was asked for."""
    right = oracle(references)
    return lambda opened, text, wanted: right(opened, text, wanted - 1)


def mixed(references: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """Right for a while, then wrong, at places that vary from round to round."""
    right = oracle(references)

    def script(opened: RequestOpen, text: list[int], wanted: int) -> Sequence[int]:
        good = len(text) % (wanted + 1)
        return [t if i < good else (t + 3) % 61 for i, t in enumerate(right(opened, text, wanted))]

    return script
