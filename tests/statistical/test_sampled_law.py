"""The real samplers, drafting and verifying with real random numbers, against the target's law.

Each test compares counts with their law by chi-square and passes if the p-value is above 1e-6,
which a right sampler misses once in a million; the seeds are fixed, so it cannot flicker. Beside
each stands a wrong sampler that must fall below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels import rejection
from outrider.kernels.draft_sampling import draft_and_pack
from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.philox import Purpose
from outrider.kernels.rejection import DrawKeys, RowParameters, verify_rejection
from tests.kernels.batches import chained
from tests.statistical.laws import chi_square_p_value

FALSE_ALARM = 1e-6
SEED = 20_240_229


def keys_at(samples: Tensor, bases: Tensor, step: int = 0) -> DrawKeys:
    return DrawKeys(
        seeds=torch.full((len(samples),), SEED),
        sample_indices=samples.int(),
        base_lengths=bases.int(),
        positions=bases.int() + step,
    )


def options(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    return RowParameters(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k, dtype=torch.int32),
        top_p=torch.full((count,), top_p),
        min_p=torch.zeros(count),
    )


class Wide:
    """A thousand words and two drafts; the laws of the three positions do not depend on the text,
    so each emitted token follows its own position's law."""

    WORDS, LENGTH, BATCH = 1000, 2, 2000

    def __init__(self, **filters: Any) -> None:
        self.filters = filters
        generator = torch.Generator().manual_seed(1)
        self.target = 2 * torch.randn(self.LENGTH + 1, self.WORDS, generator=generator)
        noise = torch.randn(self.LENGTH, self.WORDS, generator=generator)
        self.draft = self.target[: self.LENGTH] + noise

    def counts(self, requests: int, max_support: int = 240) -> tuple[np.ndarray[Any, Any], float]:
        """[K+1, V] how often each word was emitted at each position, and the acceptance rate."""
        counts = np.zeros((self.LENGTH + 1, self.WORDS), dtype=np.int64)
        accepted = 0
        for first in range(0, requests, self.BATCH):
            emitted = self.round(torch.arange(first, first + self.BATCH), max_support)
            for position in range(self.LENGTH + 1):
                words = emitted[:, position]
                counts[position] += np.bincount(words[words >= 0], minlength=self.WORDS)
            accepted += int((emitted[:, 1:] >= 0).sum())
        return counts, accepted / (requests * self.LENGTH)

    def round(self, samples: Tensor, max_support: int) -> np.ndarray[Any, Any]:
        """[B, K+1] the emitted words, -1 after the last."""
        count = len(samples)
        bases = torch.full((count,), 31)
        p = options(count, **self.filters)
        steps = [
            draft_and_pack(
                row.expand(count, -1), p, keys_at(samples, bases, j), max_support=max_support
            )
            for j, row in enumerate(self.draft)
        ]
        result = verify_rejection(
            self.target.repeat(count, 1), chained(steps), p, keys_at(samples, bases), self.WORDS
        )
        emitted = np.full((count, self.LENGTH + 1), -1)
        drafted = torch.stack([step.token_ids for step in steps], dim=1).numpy()
        ends = result.num_accepted.numpy()
        for position in range(self.LENGTH):
            kept = ends > position
            emitted[kept, position] = drafted[kept, position]
        emitted[np.arange(count), ends] = result.next_token_ids.numpy()
        return emitted

    def laws(self) -> Tensor:
        p = options(self.LENGTH + 1, **self.filters)
        return filtered_probabilities(self.target, p.temperature, p.top_k, p.top_p, p.min_p)

    def p_values(self, requests: int, max_support: int = 240) -> list[float]:
        counts, acceptance = self.counts(requests, max_support)
        assert 0.05 < acceptance < 0.9  # else some path is not exercised
        return [chi_square_p_value(c, law) for c, law in zip(counts, self.laws(), strict=True)]


def test_a_thousand_words() -> None:
    assert min(Wide().p_values(100_000)) > FALSE_ALARM


@pytest.mark.parametrize("filters", [dict(temperature=0.7, top_p=0.9), dict(top_k=40)])
@pytest.mark.parametrize("max_support", [1, 12])
def test_a_thousand_words_filtered_and_truncated(filters: dict[str, Any], max_support: int) -> None:
    assert min(Wide(**filters).p_values(20_000, max_support)) > FALSE_ALARM


def residual_is_p(p: Tensor, rows: Tensor, ids: Tensor, q: Tensor) -> Tensor:
    return p


def shared(**purposes: Purpose) -> SimpleNamespace:
    return SimpleNamespace(**({p.name: p for p in Purpose} | purposes))


def late_accepts(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    return uniform * q.double() < 0.8 * p.double()


def law_of_the_last_row(self: Any) -> Tensor:
    rows: Tensor = self.lengths[self.owners] + self.first_rows[self.owners]
    return rows


WRONG: list[tuple[str, str, Any]] = [
    ("recovered from p", "residual", residual_is_p),
    ("accepted too seldom", "accepts", late_accepts),
    ("judged by the last row", "_Chains.token_rows", property(law_of_the_last_row)),
    ("accept and draft share numbers", "Purpose", shared(ACCEPT=Purpose.DRAFT)),
]


@pytest.mark.parametrize(("name", "target", "wrong"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_sampler_of_a_thousand_words_is_caught(
    name: str, target: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"outrider.kernels.rejection.{target}", wrong)
    assert min(Wide().p_values(20_000)) < FALSE_ALARM


class Texts:
    """Whole texts of three words out of three, written in rounds of up to two drafts. Target and
    draft law depend on everything before, so the 27 texts have a known joint law."""

    WORDS, SIZE, PROMPT = 3, 3, 5

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(6)
        prefixes = [
            prefix
            for size in range(self.SIZE + 2)
            for prefix in itertools.product(range(self.WORDS), repeat=size)
        ]
        self.target = torch.randn(self.code(prefixes[-1]) + 1, self.WORDS, generator=generator)
        self.draft = torch.randn(self.target.shape, generator=generator)

    def code(self, prefix: tuple[int, ...]) -> int:
        code = 1
        for word in prefix:
            code = code * self.WORDS + word
        return code

    def law(self) -> np.ndarray[Any, Any]:
        p = torch.softmax(self.target.double(), -1).numpy()
        texts = list(itertools.product(range(self.WORDS), repeat=self.SIZE))
        return np.array(
            [np.prod([p[self.code(t[:j]), t[j]] for j in range(self.SIZE)]) for t in texts]
        )

    def p_value(
        self,
        requests: int,
        drafts_after: Callable[[Tensor, Tensor, Tensor], Tensor],
        keyed_by_base: bool = True,
    ) -> float:
        """Writes the texts. `drafts_after(accepted, drafted, counts)` gives every request's
        number of drafts for its next round, from what it drafted in the last one."""
        room = self.SIZE + 3
        texts = torch.zeros(requests, room, dtype=torch.int64)
        lengths = torch.zeros(requests, dtype=torch.int64)
        wanted = torch.full((requests,), 2)
        while bool((lengths < self.SIZE).any()):
            following = wanted.clone()
            for count in range(3):
                chosen = ((lengths < self.SIZE) & (wanted == count)).nonzero()[:, 0]
                if len(chosen):
                    accepted, drafted, news = self.round(
                        chosen, texts[chosen], lengths[chosen], count, keyed_by_base
                    )
                    texts[chosen] = news
                    lengths[chosen] += accepted + 1
                    following[chosen] = drafts_after(accepted, drafted, wanted[chosen])
            wanted = following
        codes = (texts[:, : self.SIZE] * self.WORDS ** torch.arange(self.SIZE - 1, -1, -1)).sum(-1)
        counts = codes.bincount(minlength=self.WORDS**self.SIZE)
        return chi_square_p_value(counts, self.law())

    def round(
        self, samples: Tensor, texts: Tensor, lengths: Tensor, count: int, keyed_by_base: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accepted counts, drafted words [B, K], and the texts with the round's words."""
        requests, every = len(samples), torch.arange(len(samples))
        p = options(requests)

        def keys(step: int) -> DrawKeys:
            made = keys_at(samples, lengths + self.PROMPT, step)
            bases = made.base_lengths if keyed_by_base else torch.zeros_like(made.base_lengths)
            return DrawKeys(made.seeds, made.sample_indices, bases, made.positions)

        codes = torch.ones(requests, dtype=torch.int64)
        for place in range(texts.shape[1]):
            inside = place < lengths
            codes = torch.where(inside, codes * self.WORDS + texts[:, place], codes)
        rows, steps = [self.target[self.known(codes)]], []
        for step in range(count):
            packed = draft_and_pack(self.draft[self.known(codes)], p, keys(step), tail=0.0)
            steps.append(packed)
            texts[every, lengths + step] = packed.token_ids.long()
            codes = codes * self.WORDS + packed.token_ids.long()
            rows.append(self.target[self.known(codes)])
        batch = chained(steps) if steps else empty_chains(requests)
        result = verify_rejection(
            torch.stack(rows, dim=1).flatten(0, 1), batch, p, keys(0), self.WORDS
        )
        accepted = result.num_accepted.long()
        texts[every, lengths + accepted] = result.next_token_ids.long()
        drafted = torch.stack([s.token_ids for s in steps], 1).long() if steps else codes[:, None]
        return accepted, drafted, texts

    def known(self, codes: Tensor) -> Tensor:
        """Words past the end of a text are written and never read: any law will do for them."""
        return codes % len(self.target)


def empty_chains(requests: int) -> rejection.DraftTokens:
    none = torch.zeros(0, dtype=torch.int32)
    return rejection.DraftTokens(
        cu_num_draft_tokens=torch.zeros(requests + 1, dtype=torch.int32),
        token_ids=none,
        cu_support=torch.zeros(1, dtype=torch.int32),
        support_ids=none,
        support_weights=torch.zeros(0),
        deterministic=torch.zeros(requests, dtype=torch.bool),
    )


def always_two(accepted: Tensor, drafted: Tensor, counts: Tensor) -> Tensor:
    return torch.full_like(counts, 2)


def after_the_discarded_tail(accepted: Tensor, drafted: Tensor, counts: Tensor) -> Tensor:
    """Drafts again only where the discarded second draft was word 0."""
    if drafted.shape[1] < 2:
        return torch.full_like(counts, 2)
    return torch.where((accepted == 0) & (drafted[:, 1] != 0), 0, 2)


@pytest.mark.parametrize("rule", [always_two, after_the_discarded_tail])
def test_whole_texts_written_in_rounds(rule: Any) -> None:
    assert Texts().p_value(200_000, rule) > FALSE_ALARM


def test_numbers_keyed_by_position_alone_are_caught() -> None:
    """Control. What was drawn for a discarded tail must not be drawn again for the next round,
    once anything there depends on that tail."""
    wrong = Texts().p_value(200_000, after_the_discarded_tail, keyed_by_base=False)
    assert wrong < FALSE_ALARM


def test_accept_and_recover_draws_that_share_numbers_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control. Where the base length is 0 in both keys, one purpose would be one number."""
    monkeypatch.setattr(rejection, "Purpose", shared(RECOVER=Purpose.ACCEPT))
    assert Texts().p_value(200_000, always_two, keyed_by_base=False) < FALSE_ALARM


def test_purposes_of_their_own_pass_where_sharing_fails() -> None:
    """The same keys with the product's purposes: only the sharing is at fault above."""
    assert Texts().p_value(200_000, always_two, keyed_by_base=False) > FALSE_ALARM


def test_two_seeds_are_independent() -> None:
    """The joint counts of two samples of one seed factorise."""
    count = 100_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(count, -1)
    words = [
        verify_rejection(
            logits,
            empty_chains(count),
            options(count),
            keys_at(torch.arange(count) + sample * count, torch.full((count,), 31)),
            3,
        ).next_token_ids.long()
        for sample in range(2)
    ]
    law = torch.softmax(logits[0].double(), -1)
    joint = (words[0] * 3 + words[1]).bincount(minlength=9)
    assert chi_square_p_value(joint, torch.outer(law, law).flatten()) > FALSE_ALARM
    same = (words[0] * 3 + words[0]).bincount(minlength=9)  # control: one sample used twice
    assert chi_square_p_value(same, torch.outer(law, law).flatten()) < FALSE_ALARM
