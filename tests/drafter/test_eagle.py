"""The drafter's incremental, ragged, cached forward against the head run whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.drafter.eagle import DraftSettings, Eagle3Drafter
from outrider.drafter.head import Eagle3Head, rope_tables
from outrider.drafter.training.objective import Batch, unroll
from outrider.protos.messages import DraftBatch, RequestClose, RequestOpen, VerdictBatch
from outrider.protos.sampling import SamplingParameters
from tests.drafter.heads import tiny_head

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=1.0)
CPU = torch.device("cpu")


def make_drafter(head: Eagle3Head, embedding: Tensor, **settings: object) -> Eagle3Drafter:
    options: dict[str, object] = {"cache_blocks": 64, "block_size": 4, **settings}
    return Eagle3Drafter(head, embedding, DraftSettings(**options), CPU)  # type: ignore[arg-type]


def opening(request_id: int, prompt: Sequence[int], parameters: SamplingParameters) -> RequestOpen:
    return RequestOpen(
        request_id=request_id,
        epoch=1,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.zeros(0, np.int32),
        seed=7 + request_id,
        sample_index=0,
        parameters=parameters,
        method="rejection",
    )


def verdict(
    parts: Sequence[tuple[int, int, Tensor, Sequence[int], int]], epoch: int = 1
) -> VerdictBatch:
    """parts: (request id, base, features [rows, H], token ids of the rows, drafts wanted)."""
    counts = [len(tokens) for _, _, _, tokens, _ in parts]
    return VerdictBatch(
        service="s",
        sender="v",
        round=1,
        target_version=1,
        head_version=1,
        request_ids=np.array([p[0] for p in parts], np.int64),
        epochs=np.full(len(parts), epoch, np.int32),
        base_lengths=np.array([p[1] for p in parts], np.int32),
        num_accepted=np.zeros(len(parts), np.int32),
        num_to_draft=np.array([p[4] for p in parts], np.int32),
        cu_tokens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        token_ids=np.concatenate([np.array(p[3], np.int32) for p in parts]),
        features=np.concatenate([p[2].numpy() for p in parts]),
    )


def greedy_chain(head: Eagle3Head, table: Tensor, fused: Tensor, tokens: Sequence[int], k: int):
    """Drafts by running the head whole for every token: no cache, one request."""
    cos, sin = rope_tables(head.config, 64)
    hidden, text = fused.clone(), list(tokens)
    drafts: list[int] = []
    for _ in range(k):
        rows = hidden.shape[0]
        embeds = torch.nn.functional.embedding(torch.tensor(text[1 : rows + 1]), table)
        q, key, v, residual = head.midlayer.before(embeds, hidden, cos[:rows], sin[:rows])
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            key.repeat_interleave(2, 1).transpose(0, 1)[None],
            v.repeat_interleave(2, 1).transpose(0, 1)[None],
            is_causal=True,
        )[0].transpose(0, 1)
        after = head.midlayer.after(out.reshape(rows, -1), residual)
        drafts.append(int(head.target_ids()[head.logits(after[-1]).argmax()]))
        text.append(drafts[-1])
        hidden = torch.cat([hidden, after[-1:]])
    return drafts


@pytest.fixture(scope="module")
def world() -> tuple[Eagle3Head, Tensor, Tensor, list[int]]:
    head = tiny_head()
    torch.manual_seed(1)
    table = torch.randn(64, 32)
    tokens = torch.randint(0, 61, (40,)).tolist()
    return head, table, torch.randn(40, 32), tokens


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("chunks", [[30], [16, 14], [7, 7, 7, 7, 2]])
def test_f3_chunked_catch_up_drafts_like_the_whole_head(world, k: int, chunks: list[int]) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table)
    drafter.open(opening(1, tokens[:30], GREEDY))
    at = 0
    for number, size in enumerate(chunks):
        last = number == len(chunks) - 1
        rows = range(at, at + size)
        batch = drafter.propose(
            verdict([(1, at, fused[at : at + size], [tokens[i + 1] for i in rows], k * last)])
        )
        at += size
        assert (len(batch.request_ids) == 1) is last
    assert batch.base_lengths.tolist() == [31]
    assert batch.last_token_ids.tolist() == [tokens[30]]
    assert batch.token_ids.tolist() == greedy_chain(head, table, fused[:30], tokens[:31], k)
    drafter.check_integrity()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_f1_f2_cache_after_a_verdict_equals_a_recompute(world, accepted: int) -> None:
    head, table, fused, tokens = world
    drafter, fresh = make_drafter(head, table), make_drafter(head, table)
    for d in (drafter, fresh):
        d.open(opening(1, tokens[:10], GREEDY))
    drafter.propose(verdict([(1, 0, fused[:9], tokens[1:10], 3)]))
    rows = accepted + 1
    drafter.propose(verdict([(1, 9, fused[9 : 9 + rows], tokens[10 : 10 + rows], 0)]))
    fresh.propose(verdict([(1, 0, fused[: 9 + rows], tokens[1 : 10 + rows], 0)]))
    ours, theirs = drafter.requests[1].sequence, fresh.requests[1].sequence
    assert ours.length == theirs.length == 9 + rows

    def cached(d: Eagle3Drafter) -> Tensor:
        blocks = torch.tensor(d.requests[1].sequence.blocks)
        flat = d.cache.keys.view(-1, 4, 2, 8)[blocks].flatten(0, 1)[: 9 + rows]
        return torch.cat([flat, d.cache.values.view(-1, 4, 2, 8)[blocks].flatten(0, 1)[: 9 + rows]])

    torch.testing.assert_close(cached(drafter), cached(fresh), atol=1e-5, rtol=0)


def test_resent_verdict_changes_nothing(world) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table)
    drafter.open(opening(1, tokens[:10], GREEDY))
    first = drafter.propose(verdict([(1, 0, fused[:9], tokens[1:10], 2)]))
    again = drafter.propose(verdict([(1, 0, fused[:9], tokens[1:10], 2)]))
    assert first.token_ids.tolist() == again.token_ids.tolist()


def test_ragged_batch_drafts_as_each_request_alone(world) -> None:
    head, table, fused, tokens = world
    wanted = {1: (5, 2, GREEDY), 2: (17, 5, SAMPLED), 3: (9, 0, SAMPLED), 4: (1, 3, SAMPLED)}

    def run(ids: Sequence[int]) -> dict[int, list[int]]:
        drafter = make_drafter(head, table)
        for i in ids:
            drafter.open(opening(i, tokens[: wanted[i][0] + 1], wanted[i][2]))
        batch = drafter.propose(
            verdict(
                [
                    (i, 0, fused[: wanted[i][0]], tokens[1 : wanted[i][0] + 1], wanted[i][1])
                    for i in ids
                ]
            )
        )
        batch.validate(61)
        return {int(r): chain(batch, e) for e, r in enumerate(batch.request_ids)}

    together = run([1, 2, 3, 4])
    assert set(together) == {1, 2, 4}
    for i in (1, 2, 4):
        assert run([i])[i] == together[i]
        assert len(together[i]) == wanted[i][1]


def chain(batch: DraftBatch, entry: int) -> list[int]:
    span = slice(batch.cu_num_draft_tokens[entry], batch.cu_num_draft_tokens[entry + 1])
    return [int(t) for t in batch.token_ids[span]]


def test_d2t_every_id_and_support_is_in_the_target_vocabulary(world) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table)
    drafter.open(opening(1, tokens[:10], SAMPLED))
    batch = drafter.propose(verdict([(1, 0, fused[:9], tokens[1:10], 5)]))
    batch.validate(61)
    allowed = set(head.target_ids().tolist())
    assert set(batch.support_ids.tolist()) <= allowed
    assert set(batch.token_ids.tolist()) <= allowed
    assert len(batch.support_weights) == len(batch.support_ids) > 5


def test_d6_no_drafts_past_the_heads_positions(world) -> None:
    _, table, fused, tokens = world
    drafter = make_drafter(tiny_head(max_position_embeddings=16), table)
    drafter.open(opening(1, tokens[:10], GREEDY))
    drafter.propose(verdict([(1, 0, fused[:14], tokens[1:15], 5)]))
    near = drafter.propose(verdict([(1, 14, fused[14:15], tokens[15:16], 5)]))
    assert len(near.token_ids) <= 2
    past = drafter.propose(verdict([(1, 15, fused[15:20], tokens[16:21], 5)]))
    assert len(past.request_ids) == 0
    drafter.check_integrity()


def test_gap_stale_epoch_and_unknown_request_are_not_drafted(world) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table)
    drafter.open(opening(1, tokens[:10], GREEDY))
    part = (1, 0, fused[:9], tokens[1:10], 2)
    assert len(drafter.propose(verdict([part], epoch=2)).request_ids) == 0
    assert len(drafter.propose(verdict([(9, *part[1:])])).request_ids) == 0
    assert len(drafter.propose(verdict([(1, 3, fused[3:9], tokens[4:10], 2)])).request_ids) == 0
    assert len(drafter.propose(verdict([part])).request_ids) == 0, "lost once, lost for good"
    drafter.check_integrity()


def test_full_cache_costs_drafts_and_nothing_else(world) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table, cache_blocks=3)
    drafter.open(opening(1, tokens[:10], GREEDY))
    drafter.open(opening(2, tokens[:10], GREEDY))
    batch = drafter.propose(verdict([(i, 0, fused[:9], tokens[1:10], 2) for i in (1, 2)]))
    assert batch.request_ids.tolist() == [1]
    drafter.close(RequestClose(1, 1))
    drafter.close(RequestClose(2, 1))
    assert drafter.requests == {}
    assert len(drafter.cache.free) == 3


def test_training_steps_are_what_drafting_does(world) -> None:
    """Unrolled rows of the training-time test equal the drafter's cached steps, row by row."""
    head, table, _, tokens = world
    n, k, features = 12, 3, torch.randn(1, 12, 96)
    text = torch.tensor([tokens[:n]])
    batch = Batch(text, features, torch.zeros(1, n, 32), torch.tensor([n]), torch.tensor([1]))
    rope = rope_tables(head.config, 64)
    with torch.no_grad():
        steps = list(unroll(head, table, rope, batch, k))
        projected = head.fc(features[0])
        for row in range(n - k - 1):
            drafter = make_drafter(head, table)
            drafter.open(opening(1, tokens[: row + 2], GREEDY))
            sequence = drafter.requests[1].sequence
            drafter.cache.reserve(sequence, n)
            hidden = drafter._forward(
                projected[: row + 1], text[0, 1 : row + 2], [sequence], [0], [row + 1]
            )[-1:]
            for step in range(k):
                place = int(steps[step].rows[0, :row].sum())
                torch.testing.assert_close(
                    steps[step].hidden[place], hidden[0], atol=1e-5, rtol=1e-5
                )
                hidden = drafter._forward(
                    hidden, text[0, row + 2 + step][None], [sequence], [row + 1 + step], [1]
                )


def test_broken_features_end_their_own_chain_alone(world) -> None:
    head, table, fused, tokens = world
    drafter = make_drafter(head, table)
    for i in (1, 2):
        drafter.open(opening(i, tokens[:10], SAMPLED))
    broken = fused[:9].clone()
    broken[8] = float("nan")
    batch = drafter.propose(
        verdict([(1, 0, broken, tokens[1:10], 3), (2, 0, fused[:9], tokens[1:10], 3)])
    )
    batch.validate(61)
    lengths = dict(zip(batch.request_ids.tolist(), np.diff(batch.cu_num_draft_tokens), strict=True))
    assert lengths == {1: 0, 2: 3}
