"""Training data from the target itself: answers to given prompts, or whole chats of its own.

Without prompts the target is first given the opening of a user's turn and writes the question
too (Xu et al., Magpie, arXiv 2406.08464), so that a head can be trained with no data at all.
A quarter of the answers is greedy, half sampled at temperature 0.8, a quarter at 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from outrider.drafter.training.corpus import CorpusError

TEMPERATURES = (0.0, 0.8, 0.8, 1.0)
_MARK = "\u241f"  # stands for the user's words while the template's opening is cut out


def read_prompts(path: Path) -> list[str]:
    """Reads JSON lines with `prompt` (text) or `turns` (a list, of which the first is taken).

    Raises:
        CorpusError: a line with neither.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            prompt = record["prompt"] if "prompt" in record else record["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CorpusError(
                f'{path}:{number}: {error!r}; each line must be {{"prompt": text}}'
            ) from error
        prompts.append(str(prompt))
    return prompts


@torch.inference_mode()
def write_chats(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str] | None,
    count: int,
    path: Path,
    max_new_tokens: int = 320,
    batch_size: int = 32,
    seed: int = 0,
) -> None:
    """Appends chats to `path` as JSON lines until it holds `count`; resumes where it stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    with (
        path.open("a", encoding="utf-8") as out,
        tqdm(total=count, initial=min(done, count), desc="chats") as bar,
    ):
        while done < count:
            torch.manual_seed(seed + done)
            size = min(batch_size, count - done)
            if prompts is None:
                questions = _questions(model, tokenizer, size)
            else:
                questions = [prompts[(done + i) % len(prompts)] for i in range(size)]
            contexts = [_context(tokenizer, question) for question in questions]
            temperature = TEMPERATURES[(done // batch_size) % len(TEMPERATURES)]
            for context, answer in zip(
                contexts,
                _continue(model, tokenizer, contexts, max_new_tokens, temperature),
                strict=True,
            ):
                out.write(json.dumps({"ids": context + answer, "p": len(context)}) + "\n")
            out.flush()
            done += size
            bar.update(size)


def _context(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _questions(model: Any, tokenizer: Any, count: int) -> list[str]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False
    )
    opening = tokenizer(text[: text.index(_MARK)], add_special_tokens=False)["input_ids"]
    answers = _continue(model, tokenizer, [opening] * count, 96, 1.0)
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() or "Hello" for ids in answers]


def _continue(
    model: Any, tokenizer: Any, contexts: Sequence[list[int]], limit: int, temperature: float
) -> Iterator[list[int]]:
    """What the target says after each context, its end mark included."""
    longest = max(len(c) for c in contexts)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
    choice: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    output: Tensor = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=limit,
        pad_token_id=pad,
        **choice,
    )
    for row in output[:, longest:].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else limit
        yield row[:end]
