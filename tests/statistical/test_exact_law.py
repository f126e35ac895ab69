"""The law of the emitted tokens, exactly: no sampling, no luck.

The laws of whole chains are read out of `verify_rejection` itself: every possible chain is
verified with each number of acceptances forced, while the probabilities that it would have
compared and the weights that it would have drawn from are written down.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels import rejection
from outrider.kernels.draft_sampling import draft_and_pack
from outrider.kernels.rejection import accepts, verify_rejection
from tests.kernels.batches import Draft, drafts, many_keys, parameters, q_dense, repeated
from tests.statistical.laws import (
    Residual,
    acceptance_probability,
    one_step_law,
    served_residual,
    variation,
)

EXACT = 1e-6  # float32 probabilities

P = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
Q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def one_hot(word: int) -> Tensor:
    law = torch.zeros(4, dtype=torch.float64)
    law[word] = 1
    return law


def only_the_rejected(p: Tensor, q: Tensor, rejected: int) -> Tensor:
    weights = p.clone()
    weights[rejected] = max(0.0, float(p[rejected] - q[rejected]))
    return weights


def nothing_subtracted(p: Tensor, q: Tensor, rejected: int) -> Tensor:
    return p.double()


def greedy_one_hot_steps(p: Tensor, q: Tensor) -> Tensor:
    """Every word drafted on its own, with its one-hot law, as often as q says."""
    return torch.stack(
        [weight * one_step_law(p, one_hot(w), one_hot(w)) for w, weight in enumerate(q)]
    ).sum(0)


def dropped_if_improbable(p: Tensor, q: Tensor) -> Tensor:
    """A drawn word with q under a quarter is not sent, and p is sampled instead."""
    sent = q.where(q >= 0.25, 0)
    return one_step_law(p, sent, q) + (1 - sent.sum()) * p


def test_the_step_is_exact() -> None:
    assert variation(one_step_law(P, Q, Q), P) < EXACT


TABLE: list[tuple[str, Callable[[], Tensor], float]] = [
    ("argmax drafted, softmax shipped", lambda: one_step_law(P, one_hot(0), Q), 0.3125),
    ("argmax drafted, one-hot shipped", lambda: one_step_law(P, one_hot(0), one_hot(0)), 0),
    (
        "drafted with top_k=2, raw law shipped",
        lambda: one_step_law(P, torch.tensor([4 / 7, 3 / 7, 0, 0], dtype=torch.float64), Q),
        0.1571,
    ),
    (
        "drafted at temperature 1/2, shipped at 1",
        lambda: one_step_law(P, Q**2 / (Q**2).sum(), Q),
        0.0417,
    ),
    (
        "only the rejected word's mass subtracted",
        lambda: one_step_law(P, Q, Q, weights=only_the_rejected),
        0.1167,
    ),
    ("nothing subtracted", lambda: one_step_law(P, Q, Q, weights=nothing_subtracted), 0.14),
    (
        "a reduced vocabulary on words 3 and 1, shipped in draft order",
        lambda: one_step_law(
            P,
            torch.tensor([0, 0.3, 0, 0.7], dtype=torch.float64),
            torch.tensor([0.7, 0.3, 0, 0], dtype=torch.float64),
        ),
        0.3571,
    ),
    ("no law: judged as one-hot", lambda: greedy_one_hot_steps(P, Q), 0),
    ("dropped for its own low probability", lambda: dropped_if_improbable(P, Q), 0.11),
]


@pytest.mark.parametrize(("name", "law", "distance"), TABLE, ids=[row[0] for row in TABLE])
def test_a_wrong_sampler_is_wrong_by_what_theory_says(
    name: str, law: Callable[[], Tensor], distance: float
) -> None:
    assert variation(law(), P) == pytest.approx(distance, abs=1e-4)


def random_law(generator: np.random.Generator, words: int) -> Tensor:
    weights = generator.exponential(size=words) * (generator.random(words) < 0.7)
    weights[generator.integers(words)] += 0.1
    return torch.tensor(weights / weights.sum())


@pytest.mark.parametrize("seed", range(50))
def test_the_step_is_exact_for_random_laws_with_zeros(seed: int) -> None:
    generator = np.random.default_rng(seed)
    words = int(generator.integers(2, 9))
    p, q = random_law(generator, words), random_law(generator, words)
    assert variation(one_step_law(p, q, q), p) < EXACT


def test_acceptance_is_the_ratio() -> None:
    p = torch.tensor([0.0, 0.1, 0.3, 0.5, 1e-12, 1.0])
    q = torch.tensor([0.5, 0.4, 0.3, 0.2, 1e-3, 1.0])
    want = (p.double() / q.double()).clamp(max=1)
    assert (acceptance_probability(p, q) - want).abs().max() < 1e-15
    late = acceptance_probability(p, q, lambda p, q, u: u * q < 0.9 * p)  # control
    assert (late - want).abs().max() > 0.05


class Chains:
    """Every chain of K words over V, with a random target and draft law for every prefix."""

    def __init__(self, words: int, length: int, seed: int, deterministic: bool = False) -> None:
        self.words, self.length = words, length
        generator = torch.Generator().manual_seed(seed)
        prefixes = [
            prefix
            for size in range(length + 1)
            for prefix in itertools.product(range(words), repeat=size)
        ]
        self.logits = {prefix: 1.5 * torch.randn(words, generator=generator) for prefix in prefixes}
        self.temperature = 0.8
        self.p = {
            prefix: torch.softmax(row.double() / self.temperature, -1).numpy()
            for prefix, row in self.logits.items()
        }
        self.deterministic = deterministic
        rows = 1.5 * torch.randn(len(prefixes), words, generator=generator)
        if deterministic:
            best = rows.argmax(-1).tolist()
            self.shipped = {prefix: {best[i]: 1.0} for i, prefix in enumerate(prefixes)}
        else:  # the product's own truncation and rounding
            packed = draft_and_pack(
                rows, repeated(1.0, len(rows)), many_keys(len(rows)), max_support=words - 1
            )
            self.shipped = {
                prefix: {w: float(q) for w, q in enumerate(q_dense(packed, words)[i]) if q > 0}
                for i, prefix in enumerate(prefixes)
            }
        self.paths = [
            path
            for path in itertools.product(range(words), repeat=length)
            if all(path[j] in self.shipped[path[:j]] for j in range(length))
        ]

    def chain(self, path: tuple[int, ...]) -> list[Draft]:
        """A weight list as on the wire: 2**-24 the unit, nothing for a deterministic token."""
        return [
            (word, {} if self.deterministic else self.shipped[path[:j]])
            for j, word in enumerate(path)
        ]

    def target_law(self) -> np.ndarray[Any, Any]:
        """[V] * (K + 1), the law of the next K + 1 words under plain sampling."""
        law = np.ones((self.words,) * (self.length + 1))
        for text in np.ndindex(*law.shape):
            law[text] = np.prod([self.p[text[:j]][text[j]] for j in range(self.length + 1)])
        return law

    def emitted_law(self, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
        """The same of verify_rejection, rounds that stop early continued by plain sampling."""
        law = np.zeros((self.words,) * (self.length + 1))
        certain = np.array(
            [
                np.prod([self.shipped[path[:j]][word] for j, word in enumerate(path)])
                for path in self.paths
            ]
        )
        for accepted in range(self.length + 1):
            passing, weights = self.observe(accepted, monkeypatch)
            weights = weights / weights.sum(axis=1, keepdims=True)
            for i, path in enumerate(self.paths):
                mass = certain[i] * np.prod(passing[i, :accepted])
                if accepted < self.length:
                    mass *= 1 - passing[i, accepted]
                if mass > 0:
                    self.spread(law, path[:accepted], mass * weights[i])
        return law

    def spread(
        self, law: np.ndarray[Any, Any], prefix: tuple[int, ...], masses: np.ndarray[Any, Any]
    ) -> None:
        """Adds the mass of each next word, times the target's law of what follows it."""
        for word, mass in enumerate(masses):
            self.continue_with(law, (*prefix, word), float(mass))

    def continue_with(self, law: np.ndarray[Any, Any], text: tuple[int, ...], mass: float) -> None:
        if len(text) == self.length + 1:
            law[text] += mass
        elif mass > 0:
            self.spread(law, text, mass * self.p[text])

    def observe(
        self, accepted: int, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Acceptance probabilities [paths, K] and next weights [paths, V], as verified."""
        seen: dict[str, Tensor] = {}
        requests = len(self.paths)
        rule = rejection.accepts

        def forced(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
            seen["passing"] = acceptance_probability(p, q, rule)
            return (torch.arange(len(p)) % self.length) < accepted

        def no_race(weights: Tensor, *key: Any) -> tuple[Tensor, Tensor]:
            seen["weights"] = weights.clone()
            some = torch.ones(requests, dtype=torch.bool)
            return torch.zeros(requests, dtype=torch.int64), some

        rows = [self.logits[path[:j]] for path in self.paths for j in range(self.length + 1)]
        with monkeypatch.context() as patch:
            patch.setattr(rejection, "accepts", forced)
            patch.setattr(rejection, "race", no_race)
            result = verify_rejection(
                torch.stack(rows),
                drafts([self.chain(path) for path in self.paths], self.deterministic),
                repeated(self.temperature, requests),
                many_keys(requests),
                self.words,
            )
        assert result.num_accepted.tolist() == [accepted] * requests
        passing = seen["passing"].numpy().reshape(requests, self.length)
        return passing, seen["weights"].double().numpy()


SIZES = [(2, 1), (8, 1), (3, 2), (8, 2), (2, 3), (4, 3), (8, 3)]


@pytest.mark.parametrize(("words", "length"), SIZES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_path_of_a_round(
    words: int, length: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = Chains(words, length, seed=words + length, deterministic=deterministic)
    assert variation(chains.emitted_law(monkeypatch), chains.target_law()) < EXACT


def shifted_rows(self: Any) -> Tensor:
    rows: Tensor = (self.first_rows[self.owners] + self.offsets - 1).clamp(min=0)
    return rows


MUTATIONS: list[tuple[str, str, Any]] = [
    ("nothing is subtracted", "residual", lambda p, rows, ids, q: p),
    ("one entry is subtracted", "residual", lambda p, rows, ids, q: _first_only(p, rows, ids, q)),
    ("accepted too often", "accepts", lambda p, q, u: u * q < 1.1 * p),
    ("judged by p alone", "accepts", lambda p, q, u: u < p),
    ("drafts judged by the row before", "_Chains.token_rows", property(shifted_rows)),
]


def _first_only(p: Tensor, rows: Tensor, ids: Tensor, q: Tensor) -> Tensor:
    first = torch.cat((torch.tensor([True]), rows[1:] != rows[:-1]))
    return p.index_put((rows[first], ids[first]), -q[first], accumulate=True).clamp_min(0)


@pytest.mark.parametrize(("name", "target", "wrong"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_a_wrong_round_is_caught(
    name: str, target: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = Chains(4, 3, seed=7)
    monkeypatch.setattr(f"outrider.kernels.rejection.{target}", wrong)
    assert variation(chains.emitted_law(monkeypatch), chains.target_law()) > 0.003


def test_a3_accept_rule_and_residual_use_one_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-hot residual beside a probabilistic acceptance, and the other way round."""
    deterministic, spread = Chains(4, 2, seed=1, deterministic=True), Chains(4, 2, seed=1)
    for chains in (deterministic, spread):
        assert variation(chains.emitted_law(monkeypatch), chains.target_law()) < EXACT

    def one_hot_residual(p: Tensor, q: Tensor, rejected: int) -> Tensor:
        weights = p.clone()
        weights[rejected] = 0
        return weights

    mixed: list[tuple[Any, Residual]] = [
        (accepts, one_hot_residual),
        (lambda p, q, u: u < p, served_residual),
    ]
    for rule, weights in mixed:
        assert variation(one_step_law(P, Q, Q, rule, weights), P) > 0.01


def test_a7_the_bonus_follows_the_row_after_the_last_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: the row before it is another law altogether."""
    chains = Chains(4, 3, seed=5)
    _, weights = chains.observe(3, monkeypatch)
    for i, path in enumerate(chains.paths):
        assert variation(weights[i], chains.p[path]) < EXACT
        assert variation(weights[i], chains.p[path[:2]]) > 0.01


def test_a1_a_filtered_drafter_is_exact_end_to_end() -> None:
    """Drafted with top_k=2 at three temperatures, shipped as drawn, verified against plain p."""
    for temperature in (0.5, 1.0, 2.0):
        packed = draft_and_pack(
            Q.log()[None].float(), parameters(temperature, top_k=2), many_keys(1), tail=0.0
        )
        drawn = q_dense(packed, 4)[0]
        assert variation(one_step_law(P, drawn, drawn), P) < EXACT
        assert variation(one_step_law(P, drawn, Q), P) > 0.1  # control: the raw law shipped
