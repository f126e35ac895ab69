from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kernels import rejection
from outrider.kernels.draft_sampling import draft_and_pack
from outrider.kernels.philox import Purpose, negative_exponentials
from outrider.kernels.rejection import (
    NO_TOKEN,
    DraftTokens,
    DrawKeys,
    RowParameters,
    Verification,
    accepts,
    race,
    residual,
    verify_rejection,
)
from tests.kernels.batches import (
    MAXIMUM,
    Draft,
    chained,
    drafts,
    keys,
    many_keys,
    parameters,
    repeated,
)


def random_logits(rows: int, columns: int = 61, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def decided(result: Verification) -> list[tuple[int, int, bool]]:
    return list(
        zip(
            result.num_accepted.tolist(),
            result.next_token_ids.tolist(),
            result.failed.tolist(),
            strict=True,
        )
    )


def rows_of(p: RowParameters, index: int) -> RowParameters:
    one = slice(index, index + 1)
    return RowParameters(p.temperature[one], p.top_k[one], p.top_p[one], p.min_p[one])


class TestGreedy:
    def test_drafts_are_accepted_while_they_are_the_argmax(self) -> None:
        logits = random_logits(4)
        best = logits.argmax(-1).tolist()
        wrong = (best[1] + 1) % 61
        for chain, accepted in (
            (best[:3], 3),
            ([best[0], wrong, best[2]], 1),
            ([wrong, best[1], best[2]], 0),
        ):
            result = verify_rejection(
                logits, drafts([[(t, {}) for t in chain]]), parameters(0.0), keys([0]), 61
            )
            assert decided(result) == [(accepted, best[accepted], False)]

    def test_b5_the_lowest_index_wins_a_tie(self) -> None:
        logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
        result = verify_rejection(logits, drafts([[], []]), repeated(0.0, 2), many_keys(2), 3)
        assert result.next_token_ids.tolist() == [0, 1]

    def test_ties_in_wide_rows_and_in_bfloat16(self) -> None:
        logits = torch.zeros(1, 49_152, dtype=torch.bfloat16)
        logits[0, [70, 30_001]] = 3.0
        result = verify_rejection(logits, drafts([[]]), parameters(0.0), keys([0]), 49_152)
        assert result.next_token_ids.tolist() == [70]

    def test_a_law_beside_a_greedy_request_changes_nothing(self) -> None:
        logits = random_logits(2)
        best = logits.argmax(-1).tolist()
        result = verify_rejection(
            logits, drafts([[(best[0], {3: 0.5})]]), parameters(0.0), keys([0]), 61
        )
        assert decided(result) == [(1, best[1], False)]


class TestRule:
    def test_p_at_least_q_always_passes_and_p_of_zero_never(self) -> None:
        top = torch.tensor([1 - 2.0**-33], dtype=torch.float64)
        tiny = torch.tensor([2.0**-33], dtype=torch.float64)
        for value in (1.0, 0.3, 2.0**-24, 1e-30):
            p = torch.tensor([value])
            assert bool(accepts(p, p, top))
            assert not bool(accepts(torch.zeros(1), p, tiny))
        assert not bool(accepts(torch.tensor([0.5]), torch.tensor([0.50001]), top))

    def test_nothing_passes_against_nan(self) -> None:
        nan, half = torch.tensor([torch.nan]), torch.tensor([0.5])
        assert not bool(accepts(nan, half, half)) and not bool(accepts(half, nan, half))

    def test_the_residual(self) -> None:
        p = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        q = torch.tensor([0.4, 0.1])
        got = residual(p, torch.tensor([0, 0]), torch.tensor([0, 3]), q)
        torch.testing.assert_close(got, torch.tensor([[0.0, 0.2, 0.3, 0.3]]))
        assert p.tolist() == torch.tensor([[0.1, 0.2, 0.3, 0.4]]).tolist()

    def test_a_race_with_few_runners_is_the_same_race(self) -> None:
        weights = torch.zeros(20, 5000)
        weights[:, 11:211:10] = random_logits(20, 20).softmax(-1)
        few, any_weight = race(weights, many_keys(20), torch.arange(20))
        times = negative_exponentials(
            many_keys(20).seeds,
            many_keys(20).sample_indices,
            torch.arange(20),
            Purpose.RECOVER,
            5000,
        )
        assert torch.equal(few, (times / weights).argmax(-1)) and bool(any_weight.all())

    def test_a_race_without_runners_says_so(self) -> None:
        weights = torch.tensor([[0.0, 0.0], [0.0, 1e-38]])
        drawn, any_weight = race(weights, many_keys(2), torch.tensor([0, 0]))
        assert any_weight.tolist() == [False, True] and int(drawn[1]) == 1


ONE_WORD = {7: 1.0}
SPREAD = {7: 0.5, 3: 0.25, 60: 0.25}


class TestB1NonFiniteRows:
    BROKEN = (torch.nan, torch.inf)

    def broken_rows(self) -> list[Tensor]:
        rows = [torch.full((61,), value) for value in (*self.BROKEN, -torch.inf)]
        for value, place in itertools.product(self.BROKEN, (0, 7, 33, 60)):
            row = random_logits(1)[0]
            row[place] = value
            rows.append(row)
        return rows

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("width", [61, 64])
    def test_b1_only_that_request_fails(self, temperature: float, width: int) -> None:
        options = parameters(1.0, temperature, 0.0)
        chains: list[list[Draft]] = [[(7, SPREAD)], [(7, SPREAD)], [(7, SPREAD)]]
        sound = random_logits(6, width)
        neighbours = decided(verify_rejection(sound, drafts(chains), options, many_keys(3), 61))
        for row in self.broken_rows():
            logits = sound.clone()
            logits[2, :61] = row
            got = decided(verify_rejection(logits, drafts(chains), options, many_keys(3), 61))
            assert got[1] == (0, NO_TOKEN, True)
            assert (got[0], got[2]) == (neighbours[0], neighbours[2])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_b1_masks_are_not_a_failure(self, temperature: float) -> None:
        logits = torch.full((1, 61), -torch.inf)
        logits[0, 5] = -3.0
        result = verify_rejection(logits, drafts([[]]), parameters(temperature), keys([0]), 61)
        assert decided(result) == [(0, 5, False)]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_after_a_rejection_is_never_looked_at(self, temperature: float) -> None:
        """It belongs to a text that does not exist. A broken row after an acceptance counts."""
        logits = torch.full((2, 61), -torch.inf)
        logits[0, 5] = 0.0
        logits[1] = torch.nan
        for token, want in ((7, (0, 5, False)), (5, (0, NO_TOKEN, True))):
            result = verify_rejection(
                logits, drafts([[(token, {token: 1.0})]]), parameters(temperature), keys([0]), 61
            )
            assert decided(result) == [want]

    def test_padding_may_hold_anything(self) -> None:
        logits = random_logits(2, 64)
        logits[:, 61:] = torch.nan
        for temperature in (0.0, 1.0):
            result = verify_rejection(
                logits, drafts([[(7, SPREAD)]]), parameters(temperature), keys([0]), 61
            )
            assert not bool(result.failed) and int(result.next_token_ids) < 61


class TestB2IdsThatDoNotExist:
    IDS = (-1, 61, 64, 2**31 - 1, -(2**31))

    @pytest.mark.parametrize("bad", IDS)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_b2_they_are_rejected_where_they_stand(
        self, bad: int, temperature: float, deterministic: bool
    ) -> None:
        """The next token is then the one of plain decoding: nothing was drafted there."""
        logits = random_logits(4, 64)
        logits[0, 7] = 100.0  # the first draft is certain to pass
        chain: list[Draft] = [(7, ONE_WORD), (bad, {}), (7, ONE_WORD)]
        result = verify_rejection(
            logits, drafts([chain], deterministic), parameters(temperature), keys([5], 9), 61
        )
        plain = verify_rejection(
            logits[1:2], drafts([[]]), parameters(temperature), keys([5], 10), 61
        )
        assert decided(result) == [(1, int(plain.next_token_ids), False)]

    def test_b2_a_law_with_such_ids_keeps_its_mass_there(self) -> None:
        """q has half its mass on an id that does not exist: the residual subtracts the rest."""
        p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
        counts = torch.zeros(2, dtype=torch.long)
        chain: list[Draft] = [(-1, {-1: 0.5, 0: 0.5})]
        result = verify_rejection(
            p.repeat(500, 1), drafts([chain] * 500), repeated(1.0, 500), many_keys(500), 2
        )
        counts = result.next_token_ids.bincount(minlength=2)
        assert counts.tolist() == [0, 500] and result.num_accepted.tolist() == [0] * 500


class TestB3Padding:
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
    def test_b3_padded_columns_are_never_emitted(self, temperature: float) -> None:
        logits = random_logits(600, 64)
        logits[:, 61:] = 50.0
        chains: list[list[Draft]] = [[(7, SPREAD)]] * 300
        options = repeated(temperature, 300)
        result = verify_rejection(logits, drafts(chains), options, many_keys(300), 61)
        assert int(result.next_token_ids.max()) < 61
        same = verify_rejection(logits[:, :61], drafts(chains), options, many_keys(300), 61)
        assert decided(result) == decided(same)
        unaware = verify_rejection(logits, drafts(chains), options, many_keys(300), 64)  # control
        assert int(unaware.next_token_ids.min()) >= 61


class TestMissingAndUnsoundLaws:
    def verify(self, *chain: Draft, temperature: float = 1.0, deterministic: bool = False) -> Any:
        return verify_rejection(
            random_logits(len(chain) + 1),
            drafts([list(chain)], deterministic),
            parameters(temperature),
            keys([0]),
            61,
        )

    def test_a9_a_missing_law_raises(self) -> None:
        with pytest.raises(ValueError, match=r"token_ids\[1\]: 3 is not usable"):
            self.verify((7, SPREAD), (3, {}))
        self.verify((7, {}), (3, {}), deterministic=True)
        self.verify((7, {}), (3, {}), temperature=0.0)

    def test_a_token_outside_its_own_support_raises(self) -> None:
        with pytest.raises(ValueError, match=r"token_ids\[0\]: 8 is not usable"):
            self.verify((8, SPREAD))
        with pytest.raises(ValueError, match=r"token_ids\[0\]: 8 is not usable"):
            self.verify((8, SPREAD | {8: 0.0}))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.25, 1.5])
    def test_a4_poisoned_weights_raise(self, value: float) -> None:
        for poisoned in (SPREAD | {3: value}, SPREAD | {7: value}):
            with pytest.raises(ValueError, match="support_weights"):
                self.verify((7, poisoned))

    def test_a4_weights_of_nothing_but_zeros_raise(self) -> None:
        for zero in (0.0, -0.0):
            with pytest.raises(ValueError, match=r"token_ids\[0\]"):
                self.verify((7, {7: zero, 3: zero}))

    def test_a4_weights_are_a_law_only_over_their_sum(self) -> None:
        """q is weights / sum. Half the weights are the same law, decided alike."""
        full = self.verify((7, SPREAD), (3, SPREAD))
        half = {word: weight / 2 for word, weight in SPREAD.items()}
        assert decided(full) == decided(self.verify((7, half), (3, half)))

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        logits, chain = random_logits(2), drafts([[(7, SPREAD)]])
        options, one = parameters(1.0), keys([0])
        with pytest.raises(ValueError, match="logits: 3 rows are not usable"):
            verify_rejection(random_logits(3), chain, options, one, 61)
        with pytest.raises(ValueError, match="vocab_size: 62 is not usable"):
            verify_rejection(logits, chain, options, one, 62)
        for field, value in (
            ("cu_num_draft_tokens", torch.tensor([0, 2])),
            ("cu_support", torch.tensor([0, 2])),
            ("cu_support", torch.tensor([0, 1, 3])),
        ):
            broken = DraftTokens(**(vars(chain) | {field: value}))
            with pytest.raises(ValueError, match=field):
                verify_rejection(logits, broken, options, one, 61)


def mixed_batch() -> tuple[Tensor, list[list[Draft]], list[bool], RowParameters, DrawKeys]:
    """Greedy, plain and filtered requests with 3, 0, 2, 1, 4 and 1 drafts."""
    lengths = [3, 0, 2, 1, 4, 1]
    logits = random_logits(sum(lengths) + 6, seed=3)
    generator = torch.Generator().manual_seed(8)
    chains: list[list[Draft]] = []
    for length in lengths:
        chain: list[Draft] = []
        for _ in range(length):
            words = torch.randperm(61, generator=generator)[:8].tolist()
            chain.append((words[0], dict.fromkeys(words, 2.0**-4)))
        chains.append(chain)
    best = logits.argmax(-1).tolist()
    chains[0] = [(best[0], {}), (best[1], {}), ((best[2] + 1) % 61, {})]
    chains[3] = [(best[9], {})]
    options = parameters(
        0.0, 1.0, 1.0, 0.7, 1.3, 1.0,
        top_k=[0, 0, 5, 0, 20, 0], top_p=[1.0, 1.0, 1.0, 0.8, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.0],
    )  # fmt: skip
    deterministic = [True, False, False, True, False, False]
    return logits, chains, deterministic, options, keys(range(6), base_lengths=range(20, 26))


def alone(index: int) -> tuple[int, int, bool]:
    logits, chains, deterministic, options, every = mixed_batch()
    first = sum(len(chain) + 1 for chain in chains[:index])
    rows = logits[first : first + len(chains[index]) + 1]
    return decided(
        verify_rejection(
            rows,
            drafts([chains[index]], [deterministic[index]]),
            rows_of(options, index),
            keys([int(every.seeds[index])], base_lengths=[int(every.base_lengths[index])]),
            61,
        )
    )[0]


def test_b5_a_request_is_decided_alike_alone_and_in_a_mixed_batch() -> None:
    logits, chains, deterministic, options, every = mixed_batch()
    result = verify_rejection(logits, drafts(chains, deterministic), options, every, 61)
    assert decided(result) == [alone(index) for index in range(6)]
    assert result.num_accepted.tolist()[0] == 2
    assert result.next_token_ids.tolist()[0] == int(logits[2].argmax())


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]])
def test_a9_shuffled_rows_keep_their_requests(order: list[int]) -> None:
    logits, chains, deterministic, options, every = mixed_batch()
    sizes = torch.tensor([len(chain) + 1 for chain in chains])
    blocks = logits.tensor_split(sizes.cumsum(0)[:-1])
    result = verify_rejection(
        torch.cat([blocks[i] for i in order]),
        drafts([chains[i] for i in order], [deterministic[i] for i in order]),
        RowParameters(*(values[order] for values in vars(options).values())),
        DrawKeys(*(values[order] for values in vars(every).values())),
        61,
    )
    want = [alone(index) for index in order]
    assert decided(result) == want
    # Control: laws that stay where they were while the tokens move are laws of other requests.
    moved = drafts([chains[i] for i in order], [deterministic[i] for i in order])
    laws = {
        name: getattr(drafts(chains), name)
        for name in ("cu_support", "support_ids", "support_weights")
    }
    with pytest.raises(ValueError, match="token_ids"):
        verify_rejection(
            torch.cat([blocks[i] for i in order]),
            DraftTokens(**(vars(moved) | laws)),
            RowParameters(*(values[order] for values in vars(options).values())),
            DrawKeys(*(values[order] for values in vars(every).values())),
            61,
        )


def test_requests_without_drafts_follow_p_alone() -> None:
    logits = random_logits(5)
    result = verify_rejection(logits, drafts([[]] * 5), repeated(1.0, 5), many_keys(5), 61)
    drawn, _ = race(torch.softmax(logits, -1), many_keys(5), many_keys(5).positions)
    assert result.next_token_ids.tolist() == drawn.tolist()
    assert result.num_accepted.tolist() == [0] * 5


def test_the_bonus_draw_is_keyed_by_its_position_alone() -> None:
    """However many drafts came before it, the token at a position sees the same numbers."""
    last = random_logits(1)
    certain = torch.full((1, 61), -torch.inf)
    certain[0, 7] = 0.0
    seen = set()
    for accepted in range(4):
        result = verify_rejection(
            torch.cat([certain] * accepted + [last]),
            drafts([[(7, ONE_WORD)] * accepted]),
            parameters(1.0),
            keys([3], base_lengths=20 - accepted),
            61,
        )
        assert int(result.num_accepted) == accepted
        seen.add(int(result.next_token_ids))
    assert len(seen) == 1


def test_a_batch_of_no_requests_gives_nothing() -> None:
    empty = keys([])
    result = verify_rejection(torch.empty(0, 61), drafts([]), parameters(), empty, 61)
    assert decided(result) == []


def test_b6_an_empty_residual_falls_back_to_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding can leave p <= q everywhere. The number is then made the largest there is."""
    p = torch.tensor([[0.25, 0.75 - 2.0**-20]])
    q = {0: 0.25, 1: 0.75}
    monkeypatch.setattr(rejection, "filtered_probabilities", lambda logits, *_: p.repeat(80, 1))
    monkeypatch.setattr(
        rejection,
        "random_words",
        lambda *key: (torch.full((40,), MAXIMUM), torch.full((40,), MAXIMUM)),
    )
    result = verify_rejection(
        torch.zeros(80, 2), drafts([[(1, q)]] * 40), repeated(1.0, 40), many_keys(40), 2
    )
    assert result.num_accepted.tolist() == [0] * 40 and not bool(result.failed.any())
    assert set(result.next_token_ids.tolist()) == {0, 1}
    weights = residual(p, torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([0.25, 0.75]))
    assert not bool(weights.any())  # control: without the fallback there is nothing to draw from


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_decided_as_their_values_in_float32(dtype: torch.dtype) -> None:
    logits, chains, deterministic, options, every = mixed_batch()
    batch = drafts(chains, deterministic)
    low = logits.to(dtype)
    got = verify_rejection(low, batch, options, every, 61)
    assert decided(got) == decided(verify_rejection(low.float(), batch, options, every, 61))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The sizes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_nothing_grows_beyond_the_rows_of_logits() -> None:
    """No dense q, no noise for every row: the largest tensor is p itself."""
    requests, length, words = 40, 5, 1000
    rows = torch.randn(requests * (length + 1), words)
    logits = random_logits(requests, words)
    steps = [
        draft_and_pack(logits, repeated(1.0, requests), many_keys(requests, base_length=j))
        for j in range(length)
    ]
    batch = chained(steps)
    with Allocations() as seen:
        verify_rejection(rows, batch, repeated(1.0, requests), many_keys(requests), words)
    assert seen.largest == rows.numel()
