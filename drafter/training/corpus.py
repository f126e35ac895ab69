"""Chats answered by the target, and the target's features for them, as flat arrays on disk.

A corpus folder holds, for N chats and T tokens in all:

    offsets.npy    [N+1] int64   tokens of chat i are offsets[i] : offsets[i+1]
    prompts.npy    [N]   int64   how many of them are the prompt
    tokens.npy     [T]   int32
    features.bin   [T, n*H] uint16 (bfloat16)   the head's input layers, side by side
    hidden.bin     [T, H]   uint16 (bfloat16)   the normalised last state, the lm_head's input

The features are computed once and read many times: for a small target that is two thirds of
the arithmetic of a training step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

_TOKENS_PER_BATCH = 4096


class CorpusError(ValueError):
    """A training file that cannot be used; the message names the line and the remedy."""


@dataclass(frozen=True)
class Chat:
    """One conversation as the target sees it.

    ids: token ids of the whole chat-template text; prompt_length: how many are the prompt.
    """

    ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class Corpus:
    """Memory-mapped arrays of a corpus folder; shapes in the module docstring."""

    offsets: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    features: npt.NDArray[np.uint16]
    hidden: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.prompts)

    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] int64: tokens per chat."""
        return np.diff(self.offsets)


def read_chats(path: Path, vocab_size: int, max_length: int) -> list[Chat]:
    """Reads JSON lines `{"ids": [...], "p": prompt length}`, gzipped or not.

    Chats are cut at `max_length` tokens; one whose answer is then empty is left out.

    Raises:
        CorpusError: a line that is not such an object, or an id outside the vocabulary.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    chats: list[Chat] = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                ids, prompt = tuple(int(i) for i in record["ids"]), int(record["p"])
            except (ValueError, KeyError, TypeError) as error:
                raise CorpusError(
                    f"{path}:{number}: {error!r}; each line must be "
                    '{"ids": [token ids], "p": prompt length}'
                ) from error
            if not 0 < prompt <= len(ids):
                raise CorpusError(f"{path}:{number}: p={prompt} outside 1..{len(ids)}")
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise CorpusError(
                    f"{path}:{number}: token id outside 0..{vocab_size - 1}; "
                    "was this file tokenised for another target?"
                )
            if min(len(ids), max_length) - prompt >= 2:
                chats.append(Chat(ids[:max_length], prompt))
    if not chats:
        raise CorpusError(f"{path}: no chat with an answer of two tokens or more")
    return chats


def write_corpus(model: Any, chats: Sequence[Chat], layers: Sequence[int], folder: Path) -> None:
    """Runs the target over every chat and writes the corpus folder; resumes where it stopped.

    Args:
        model: a transformers causal LM.
        layers: indices into `hidden_states` (0 is the embedding).
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(c.ids) for c in chats], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total, hidden_size = int(offsets[-1]), int(model.config.hidden_size)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "prompts.npy", np.array([c.prompt_length for c in chats], dtype=np.int64))
    np.save(folder / "tokens.npy", np.concatenate([np.array(c.ids, np.int32) for c in chats]))
    features = _map(folder / "features.bin", (total, len(layers) * hidden_size), "create")
    hidden = _map(folder / "hidden.bin", (total, hidden_size), "create")
    batches = list(_batches(lengths))
    progress = folder / "progress"
    done = int(progress.read_text()) if progress.exists() else 0
    with tqdm(total=total, unit="tok", desc="features", mininterval=5) as bar:
        bar.update(sum(int(lengths[b].sum()) for b in batches[:done]))
        for number, batch in enumerate(batches[done:], done + 1):
            _write_batch(model, chats, layers, offsets, batch, features, hidden)
            bar.update(int(lengths[batch].sum()))
            if number % 32 == 0 or number == len(batches):
                features.flush()
                hidden.flush()
                progress.write_text(str(number))


def open_corpus(folder: Path) -> Corpus:
    """Maps a finished corpus folder, read-only."""
    offsets = np.load(folder / "offsets.npy")
    total = int(offsets[-1])
    size = (folder / "hidden.bin").stat().st_size // (2 * total)
    width = (folder / "features.bin").stat().st_size // (2 * total)
    return Corpus(
        offsets,
        np.load(folder / "prompts.npy"),
        np.load(folder / "tokens.npy"),
        _map(folder / "features.bin", (total, width), "read"),
        _map(folder / "hidden.bin", (total, size), "read"),
    )


def _map(path: Path, shape: tuple[int, int], how: str) -> np.memmap[Any, np.dtype[np.uint16]]:
    mode: Any = "r" if how == "read" else ("r+" if path.exists() else "w+")
    return np.memmap(path, dtype=np.uint16, mode=mode, shape=shape)


def _batches(lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Chats of like length together, so that padding is small."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, _TOKENS_PER_BATCH // int(lengths[order[start]]))
        yield order[start : start + count]
        start += count


@torch.no_grad()
def _write_batch(
    model: Any,
    chats: Sequence[Chat],
    layers: Sequence[int],
    offsets: npt.NDArray[np.int64],
    batch: npt.NDArray[np.int64],
    features: npt.NDArray[np.uint16],
    hidden: npt.NDArray[np.uint16],
) -> None:
    longest = max(len(chats[i].ids) for i in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, i in enumerate(batch):
        n = len(chats[i].ids)
        ids[row, :n] = torch.tensor(chats[i].ids)
        mask[row, :n] = 1
    device = next(model.parameters()).device
    output = model.base_model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        output_hidden_states=True,
        use_cache=False,
    )
    states = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
    wide = states.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
    last = output.last_hidden_state.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
    for row, i in enumerate(batch):
        n = len(chats[i].ids)
        features[offsets[i] : offsets[i] + n] = wide[row, :n]
        hidden[offsets[i] : offsets[i] + n] = last[row, :n]
