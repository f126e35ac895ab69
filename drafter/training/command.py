"""`outrider train-head`, given a target that is already loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafter.checkpoint import save_head
from outrider.drafter.head_config import HeadConfig, HeadError, default_feature_layers
from outrider.drafter.training.corpus import Corpus, open_corpus, read_chats, write_corpus
from outrider.drafter.training.generate import read_prompts, write_chats
from outrider.drafter.training.overlap import write_fingerprints
from outrider.drafter.training.plot import plot_training
from outrider.drafter.training.trainer import (
    Trainer,
    TrainingPlan,
    draft_vocabulary,
    start_head,
)
from outrider.drafter.training.validation import Validation


@dataclass(frozen=True)
class HeadShape:
    """What may be chosen of a new head; 0 and () mean the target's own or the usual value."""

    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingData:
    """Where chats come from: answered ones, else prompts to answer, else the target alone.

    held_out: one in this many distinct prompts is kept for validation; max_length: tokens a chat.
    """

    data: Path | None = None
    prompts: Path | None = None
    count: int = 4096
    held_out: int = 40
    max_length: int = 640


def train_head(
    model: Any,
    tokenizer: Any,
    data: TrainingData,
    shape: HeadShape,
    plan: TrainingPlan,
    out: Path,
) -> Validation:
    """Trains a head for `model` into `out`; run again, it goes on where it stopped.

    Raises:
        CorpusError, HeadError: unusable data or shape.
    """
    config = head_config(model.config, shape)
    work = out / "work"
    chats_path = data.data
    if chats_path is None:
        chats_path = work / "chats.jsonl"
        prompts = read_prompts(data.prompts) if data.prompts else None
        write_chats(model, tokenizer, prompts, data.count, chats_path)
    folder = work / "corpus"
    if not (folder / "finished").exists():
        chats = read_chats(chats_path, model.config.vocab_size, data.max_length)
        write_corpus(model, chats, config.feature_layers, folder)
        (folder / "finished").touch()
    corpus = open_corpus(folder)
    held = held_out_chats(corpus, data.held_out)
    vocabulary = draft_vocabulary(
        corpus.tokens, _training_answers(corpus, held), config.draft_vocab_size
    )
    trainer = Trainer(
        start_head(config, model, vocabulary, plan.seed),
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
        corpus,
        held,
        plan,
        work,
    )
    trainer.resume()
    result = trainer.run()
    save_head(trainer.head, out)
    write_fingerprints(_prompts(corpus, tokenizer), out / "training_prompts.npy")
    plot_training(work / "log.jsonl", out / "training.png")
    (out / "training.json").write_text(
        json.dumps({"plan": asdict(plan), "validation": asdict(result)}, indent=2) + "\n",
        encoding="utf-8",
    )
    return result


def head_config(target: Any, shape: HeadShape) -> HeadConfig:
    """The head's sizes for a target's transformers config.

    Raises:
        HeadError: layers out of range, or a target too shallow.
    """
    layers = shape.feature_layers or default_feature_layers(target.num_hidden_layers)
    if max(layers) > target.num_hidden_layers:
        raise HeadError(
            f"feature_layers: {list(layers)} reach past the target's {target.num_hidden_layers}"
        )
    heads = target.num_attention_heads
    return HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        feature_layers=tuple(layers),
        rope=dict(target.rope_parameters),
    )


def held_out_chats(corpus: Corpus, one_in: int) -> list[int]:
    """Chats whose prompt falls in the held-out share. By prompt, so that no answer to a prompt of
    validation is ever trained on."""
    held = []
    for i in range(len(corpus)):
        start = int(corpus.offsets[i])
        prompt = corpus.tokens[start : start + int(corpus.prompts[i])]
        if int(hashlib.sha256(prompt.tobytes()).hexdigest(), 16) % one_in == 0:
            held.append(i)
    if not held or len(held) == len(corpus):
        raise HeadError(
            f"held_out: one prompt in {one_in} leaves {len(held)} of {len(corpus)} chats for "
            "validation; give more chats"
        )
    return held


def _prompts(corpus: Corpus, tokenizer: Any) -> Iterator[str]:
    """The text of every prompt, held out or not: all of them took part in choosing the head."""
    for i in range(len(corpus)):
        start = int(corpus.offsets[i])
        ids = corpus.tokens[start : start + int(corpus.prompts[i])].tolist()
        yield tokenizer.decode(ids, skip_special_tokens=True)


def _training_answers(corpus: Corpus, held: list[int]) -> Any:
    """[T] bool: the tokens that training predicts."""
    answers = np.ones(len(corpus.tokens), dtype=np.bool_)
    for i in range(len(corpus)):
        start = int(corpus.offsets[i])
        answers[start : start + int(corpus.prompts[i])] = False
    for i in held:
        answers[int(corpus.offsets[i]) : int(corpus.offsets[i + 1])] = False
    return answers
