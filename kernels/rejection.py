"""Token-wise rejection sampling (Leviathan et al., "Fast inference from transformers via
speculative decoding"), and greedy verification, for a ragged batch.

p is the target's law of a row after all filters; q is the law that a draft token was drawn from.
A draft token x is accepted with probability min(1, p(x) / q(x)). At a request's first rejection
the recovered token is drawn from (p - q)+; after the last acceptance the bonus token is drawn
from p. Either way every emitted token follows p exactly.

Axes: B requests, N draft tokens of all of them, R = N + B rows of logits, M support entries,
V words. Request b owns rows cu[b] + b up to and including cu[b+1] + b: one for each of its draft
tokens and one for the token after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.filters import filtered_probabilities
from outrider.kernels.philox import Purpose, negative_exponentials, random_words, unit_interval

NO_TOKEN = -1

# A race works through so many numbers at a time: its buffers stay in the cache of a core, and
# their size does not grow with the batch.
_RACE_SIZE = 2**16


@dataclass(frozen=True)
class RowParameters:
    """How each request is sampled. Temperature 0 is greedy; 0, 1 and 0 turn the filters off."""

    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]
    top_p: Tensor  # float32 [B]
    min_p: Tensor  # float32 [B]


@dataclass(frozen=True)
class DrawKeys:
    """Which random numbers each request sees."""

    seeds: Tensor  # int64 [B], all 64 bits used
    sample_indices: Tensor  # int32 [B]
    base_lengths: Tensor  # int32 [B], the committed length at which the chain is verified
    positions: Tensor  # int32 [B], of the first token that is decided


@dataclass(frozen=True)
class DraftTokens:
    """Chains of draft tokens and the law of each, weights over their own sum.

    A token of a deterministic request has all its mass on itself, whatever its slice holds.
    """

    cu_num_draft_tokens: Tensor  # int32 [B+1]
    token_ids: Tensor  # int32 [N]; an id outside the vocabulary is rejected where it stands
    cu_support: Tensor  # int32 [N+1]
    support_ids: Tensor  # int32 [M]
    support_weights: Tensor  # float32 [M]
    deterministic: Tensor  # bool [B]


@dataclass(frozen=True)
class Verification:
    """What was decided. A failed request has no token: its deciding row was not finite."""

    num_accepted: Tensor  # int32 [B]
    next_token_ids: Tensor  # int32 [B]; NO_TOKEN where it failed
    failed: Tensor  # bool [B]


def verify_rejection(
    logits: Tensor,
    drafts: DraftTokens,
    parameters: RowParameters,
    keys: DrawKeys,
    vocab_size: int,
) -> Verification:
    """Decides every chain and draws every next token.

    Raises ValueError for a batch whose parts do not fit together, and for a sampled draft token
    without a law that can have produced it: a missing or unsound q is never guessed.

    Args:
        logits: [N + B, V] any float type; columns from `vocab_size` on are padding.
        drafts: the chains.
        parameters: one row a request.
        keys: one row a request. Draft j of a request is decided with the ACCEPT number of its
            seed, sample index, base length and position + j, the next token with the RECOVER
            numbers of its seed, sample index and position + accepted.
        vocab_size: the number of words that exist.
    """
    chains = _Chains.of(drafts, logits, vocab_size)
    if vocab_size < logits.shape[1]:
        logits = logits[:, :vocab_size]
    sampled = parameters.temperature > 0  # [B]
    if bool(sampled.all()):
        return _verify_sampled(logits, drafts, chains, parameters, keys)
    if not bool(sampled.any()):
        return _verify_greedy(logits, drafts, chains)
    return _verify_mixed(logits, drafts, chains, parameters, keys, sampled)


def accepts(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """Whether a token with these probabilities passes: with probability min(1, p / q).

    In float64, so that a number below 1 can never refuse a token with p >= q > 0.
    """
    return uniform.double() * q.double() < p.double()


def residual(p: Tensor, rows: Tensor, ids: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ for a sparse q: the weights of the recovered tokens, not normalised.

    Args:
        p: float32 [R, V].
        rows: int64 [M], the row of each entry of q.
        ids: int64 [M], its word.
        q: float32 [M].
    """
    return p.index_put((rows, ids), -q, accumulate=True).clamp_min_(0)


def race(weights: Tensor, keys: DrawKeys, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one index a row with probability proportional to its weight.

    Each index runs for an exponential time of rate `weight`; the first to arrive is drawn.

    Args:
        weights: float32 [B, V], not negative.
        keys: one row a draw; base lengths and positions are not used.
        positions: int64 [B].

    Returns:
        int64 [B], the index, and bool [B], whether the row had any weight.
    """
    batch, size = weights.shape
    drawn = torch.empty(batch, dtype=torch.int64, device=weights.device)
    best = torch.empty(batch, dtype=torch.float64, device=weights.device)
    step = max(1, _RACE_SIZE // size)
    for start in range(0, batch, step):
        part = slice(start, start + step)
        scores = _race_scores(
            weights[part], keys.seeds[part], keys.sample_indices[part], positions[part]
        )
        torch.max(scores, dim=-1, out=(best[part], drawn[part]))
    return drawn, best > float("-inf")


def _race_scores(weights: Tensor, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Minus the arrival times; minus infinity without weight. Few runners draw few numbers."""
    runners = weights.nonzero()  # [n, 2]
    if len(runners) * _SPARSE >= weights.numel():
        times = negative_exponentials(
            seeds, samples, positions, Purpose.RECOVER, weights.shape[1]
        )
        return times / weights
    rows, indices = runners.unbind(-1)
    times = negative_exponentials_at(
        seeds[rows], samples[rows], positions[rows], Purpose.RECOVER, indices
    )
    scores = torch.full(
        weights.shape, float("-inf"), dtype=torch.float64, device=weights.device
    )
    return scores.index_put_((rows, indices), times / weights[rows, indices])


@dataclass(frozen=True)
class _Chains:
    """Where everything of a ragged batch lies."""

    lengths: Tensor  # int64 [B], draft tokens of each request
    owners: Tensor  # int64 [N], the request of each draft token
    offsets: Tensor  # int64 [N], its place in the chain
    first_rows: Tensor  # int64 [B]

    @classmethod
    def of(cls, drafts: DraftTokens, logits: Tensor, vocab_size: int) -> _Chains:
        """Checks that the parts fit together."""
        ends = drafts.cu_num_draft_tokens.long()
        lengths = ends.diff()
        tokens, requests = len(drafts.token_ids), len(lengths)
        if int(ends[0]) != 0 or int(ends[-1]) != tokens or bool((lengths < 0).any()):
            raise ValueError(
                f"cu_num_draft_tokens: {ends.tolist()} is not usable; it rises from 0 to {tokens}"
            )
        if logits.shape[0] != tokens + requests:
            raise ValueError(
                f"logits: {logits.shape[0]} rows are not usable; {tokens} draft tokens of "
                f"{requests} requests need {tokens + requests}"
            )
        if not 0 < vocab_size <= logits.shape[1]:
            raise ValueError(
                f"vocab_size: {vocab_size} is not usable; the logits have {logits.shape[1]} columns"
            )
        numbers = torch.arange(requests, device=ends.device)
        owners = numbers.repeat_interleave(lengths, output_size=tokens)
        offsets = torch.arange(tokens, device=ends.device) - ends[owners]
        return cls(lengths, owners, offsets, ends[:-1] + numbers)

    @property
    def token_rows(self) -> Tensor:
        """int64 [N], the row whose law decides each draft token."""
        return self.first_rows[self.owners] + self.offsets

    def count_accepted(self, accepted: Tensor) -> Tensor:
        """int64 [B], how many tokens stand before each request's first rejection."""
        stops = torch.where(accepted, self.lengths[self.owners], self.offsets)
        return self.lengths.scatter_reduce(0, self.owners, stops, "amin")


def _verify_greedy(logits: Tensor, drafts: DraftTokens, chains: _Chains) -> Verification:
    peaks, best = logits.max(dim=-1)  # the first index of equal values; NaN wins
    num_accepted = chains.count_accepted(best[chains.token_rows] == drafts.token_ids)
    rows = chains.first_rows + num_accepted
    return _verification(num_accepted, best[rows], ~torch.isfinite(peaks[rows]))


def _verify_sampled(
    logits: Tensor,
    drafts: DraftTokens,
    chains: _Chains,
    parameters: RowParameters,
    keys: DrawKeys,
) -> Verification:
    rows_each = chains.lengths + 1
    p = filtered_probabilities(
        logits,
        parameters.temperature.repeat_interleave(rows_each, output_size=len(logits)),
        parameters.top_k.repeat_interleave(rows_each, output_size=len(logits)),
        parameters.top_p.repeat_interleave(rows_each, output_size=len(logits)),
        parameters.min_p.repeat_interleave(rows_each, output_size=len(logits)),
    )
    law = _DraftLaw.of(drafts, chains, p.shape[1])
    num_accepted = chains.count_accepted(_accepted(p, law, drafts, chains, keys))
    positions = keys.positions + num_accepted
    rows = chains.first_rows + num_accepted
    deciding = p if len(p) == len(rows) else p[rows]  # [B, V]
    weights = _next_weights(deciding, law, drafts, chains, num_accepted)
    drawn, any_weight = race(weights, keys, positions)
    # A softmax is NaN throughout if one of its inputs is NaN or +inf, or if all are -inf.
    failed = ~torch.isfinite(deciding[:, 0])
    # In exact arithmetic a rejection implies p < q somewhere, hence p > q elsewhere. Rounding can
    # leave nothing; what is left of p there is p itself.
    empty = ~(any_weight | failed)
    if bool(empty.any()):
        again = empty.nonzero()[:, 0]
        drawn[again], _ = race(deciding[again], _keys_of(keys, again), positions[again])
    return _verification(num_accepted, drawn, failed)
