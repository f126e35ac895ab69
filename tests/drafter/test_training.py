"""Head training on a tiny target: the stated loss, exact resumption, sound data."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafter.checkpoint import load_head
from outrider.drafter.training.command import (
    HeadShape,
    TrainingData,
    held_out_chats,
    train_head,
)
from outrider.drafter.training.corpus import Corpus, CorpusError, open_corpus, read_chats
from outrider.drafter.training.corpus import write_corpus as write
from outrider.drafter.training.generate import read_prompts, write_chats
from outrider.drafter.training.objective import TOTAL_VARIATION_SHARE, _AcceptanceLoss
from outrider.drafter.training.overlap import fingerprints
from outrider.drafter.training.trainer import TrainingPlan, draft_vocabulary
from outrider.drafter.training.validation import walk

MT_BENCH = Path(__file__).parents[1] / "data" / "mt_bench_questions.jsonl"
SHIPPED = Path(__file__).parents[2] / "drafter" / "heads" / "smollm2-135m-instruct"
PLAN = TrainingPlan(steps=6, tokens_per_step=64, unroll=2, warmup=2, checkpoint_every=3)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "chats.jsonl.gz"
    with gzip.open(path, "wt") as out:
        for _ in range(24):
            ids = rng.integers(0, 61, rng.integers(12, 30)).tolist()
            out.write(json.dumps({"ids": ids, "p": 5}) + "\n")
    return path


def run(target: LlamaForCausalLM, chats: Path, out: Path, plan: TrainingPlan):
    data = TrainingData(data=chats, held_out=4)
    return train_head(target, _Tokenizer(), data, HeadShape(draft_vocab_size=40), plan, out)


def test_loss_and_gradients_are_the_stated_blend() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 16), torch.randn(40, 16)
    target_hidden, target_weight = torch.randn(300, 16), torch.randn(40, 16)
    fused = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = _AcceptanceLoss.apply(*fused, target_hidden, target_weight)
    loss.backward()
    p = (target_hidden @ target_weight.T).softmax(-1)
    log_q = (plain[0] @ plain[1].T).log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1).mean()
    variation = 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
    share = TOTAL_VARIATION_SHARE
    expected = (1 - share) * cross_entropy + share * variation
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_walk_expects_what_rounds_would_do() -> None:
    rng = np.random.default_rng(0)
    steps, chats, rows = 3, 2, 40
    accept = rng.random((steps, chats, rows))
    prompts, lengths = [4, 7], [41, 33]
    tokens = rounds = 0
    draws = 4000
    for _ in range(draws):
        for chat in range(chats):
            row = prompts[chat] - 1
            while row + 2 < lengths[chat]:
                accepted = 0
                while accepted < steps and rng.random() < accept[accepted, chat, row]:
                    accepted += 1
                row += 1 + accepted
                tokens += 1 + accepted
                rounds += 1
    walked = walk(torch.from_numpy(accept), torch.tensor(prompts), torch.tensor(lengths))
    # A mean of some 150,000 rounds: 0.01 is more than three standard errors.
    assert walked[0] / walked[1] == pytest.approx(tokens / rounds, abs=0.01)
    every_position = 1 + np.cumprod(accept, 0).sum(0).mean()
    assert abs(every_position - tokens / rounds) > 0.02  # what the walk corrects


def test_interrupted_run_ends_as_an_uninterrupted_one(target, chats: Path, tmp_path: Path) -> None:
    whole = run(target, chats, tmp_path / "whole", PLAN)
    half = tmp_path / "half"
    with pytest.raises(_Killed):
        train_killed(target, chats, half, step=3)
    resumed = run(target, chats, half, PLAN)
    assert resumed.overlap == whole.overlap
    ours = load_head(half, 8, torch.float32).state_dict()
    for name, tensor in load_head(tmp_path / "whole", 8, torch.float32).state_dict().items():
        assert torch.equal(ours[name], tensor), name
    made_by_training = ("training.png", "training.json", "training_prompts.npy")
    for made in (*made_by_training, "config.json", "model.safetensors"):
        assert (half / made).stat().st_size > 0


class _Killed(Exception):
    pass


def train_killed(target, chats: Path, out: Path, step: int) -> None:
    from outrider.drafter.training import trainer

    save = trainer.Trainer.save

    def save_and_die(self: trainer.Trainer) -> None:
        save(self)
        if self.step >= step:
            raise _Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "save", save_and_die)
        run(target, chats, out, PLAN)


def test_training_lowers_the_loss(target, chats: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=40, learning_rate=3e-3)
    run(target, chats, tmp_path / "out", plan)
    lines = (tmp_path / "out" / "work" / "log.jsonl").read_text().splitlines()
    losses = [e["loss"] for e in map(json.loads, lines) if "loss" in e]
    assert sum(losses[-5:]) < sum(losses[:5]), losses


def test_corpus_holds_the_targets_own_states(target, chats: Path, tmp_path: Path) -> None:
    read = read_chats(chats, 61, 64)
    write(target, read, (2, 4, 5), tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus")
    chat = 7
    with torch.no_grad():
        output = target.model(torch.tensor([read[chat].ids]), output_hidden_states=True)
    expected = torch.cat([output.hidden_states[i] for i in (2, 4, 5)], -1)[0].to(torch.bfloat16)
    span = slice(int(corpus.offsets[chat]), int(corpus.offsets[chat + 1]))
    stored = torch.from_numpy(corpus.features[span].copy()).view(torch.bfloat16)
    torch.testing.assert_close(stored.float(), expected.float(), atol=2e-2, rtol=2e-2)
    last = torch.from_numpy(corpus.hidden[span].copy()).view(torch.bfloat16).float()
    torch.testing.assert_close(last, output.last_hidden_state[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"ids": [1, 2], "p": 5}', "p=5"),
        ('{"ids": [1, 99, 3, 4], "p": 1}', "outside 0..60"),
        ('{"text": "x"}', "KeyError"),
        ("not json", "JSONDecodeError"),
    ],
)
def test_unusable_training_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"ids": [1, 2, 3, 4], "p": 1}\n' + line + "\n")
    with pytest.raises(CorpusError, match=rf"bad\.jsonl:2: .*{complaint}"):
        read_chats(path, 61, 64)


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 5) for _ in range(30)]
    tokens = np.concatenate([np.concatenate([prompts[i % 30], [1, 2]]) for i in range(90)])
    corpus = Corpus(
        np.arange(0, 7 * 90 + 1, 7),
        np.full(90, 5),
        tokens.astype(np.int32),
        np.zeros((630, 3), np.uint16),
        np.zeros((630, 1), np.uint16),
    )
    held = set(held_out_chats(corpus, 4))
    for i in range(90):
        assert (i in held) is ((i % 30) in held)


def test_draft_vocabulary_is_the_most_used_ids_ascending() -> None:
    tokens = np.array([5, 5, 5, 9, 9, 2, 7], np.int32)
    answer = np.array([1, 1, 1, 1, 1, 0, 1], bool)
    assert draft_vocabulary(tokens, answer, 2).tolist() == [5, 9]
    assert draft_vocabulary(tokens, answer, 4).tolist() == [0, 5, 7, 9]


class _Tokenizer:
    """Numbers as words; enough of a tokenizer for chats of the tiny target."""

    pad_token_id = 0
    eos_token_id = 60

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        return f"1 2 {messages[0]['content']} 3"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split() if word.isdigit()]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in ids if i != 60)


@pytest.mark.parametrize("prompts", [None, ["7 8 9", "10"]])
def test_target_makes_its_own_chats_and_resumes(target, tmp_path: Path, prompts) -> None:
    short, path = tmp_path / "short.jsonl", tmp_path / "chats.jsonl"
    options = {"max_new_tokens": 6, "batch_size": 3}
    write_chats(target, _Tokenizer(), prompts, 3, short, **options)
    write_chats(target, _Tokenizer(), prompts, 6, short, **options)
    write_chats(target, _Tokenizer(), prompts, 6, path, **options)
    assert short.read_text() == path.read_text()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["ids"][:2] == [1, 2]
        assert 1 <= len(record["ids"]) - record["p"] <= 6


def test_prompt_files_are_read_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n')
    assert read_prompts(path) == ["a", "b"]
    path.write_text('{"x": 1}\n')
    with pytest.raises(CorpusError, match=r"prompts\.jsonl:1"):
        read_prompts(path)


def test_shipped_head_never_saw_mt_bench() -> None:
    from outrider.drafter.training.overlap import read_fingerprints

    questions = [json.loads(line) for line in MT_BENCH.read_text().splitlines()]
    turns = [turn for question in questions for turn in question["turns"]]
    seen = read_fingerprints(SHIPPED / "training_prompts.npy")
    asked = fingerprints(turns)
    assert len(seen) > 5000
    assert len(asked) > 300
    assert not seen & asked
    # Negative control: one question among the prompts is found.
    leaked = seen | fingerprints([max(turns, key=len)])
    assert leaked & asked
