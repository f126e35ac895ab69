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
from outrider.kernels.philox import (
    Purpose,
    negative_exponentials,
    negative_exponentials_at,
    random_words,
    unit_interval,
)

NO_TOKEN = -1

# A race works through so many numbers at a time: its buffers stay in the cache of a core, and
# their size does not grow with the batch.
_RACE_SIZE = 2**16
# One runner among so many indices is few: only the runners' numbers are drawn then.
_SPARSE = 16


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
    if int(torch.count_nonzero(weights)) * _SPARSE >= weights.numel():
        times = negative_exponentials(seeds, samples, positions, Purpose.RECOVER, weights.shape[1])
        return times.div_(weights)
    rows, indices = weights.nonzero().unbind(-1)
    times = negative_exponentials_at(
        seeds[rows], samples[rows], positions[rows], Purpose.RECOVER, indices
    )
    scores = torch.full(weights.shape, float("-inf"), dtype=torch.float64, device=weights.device)
    return scores.index_put_((rows, indices), times.div_(weights[rows, indices]))


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
    finite = torch.isfinite(peaks)
    rows = chains.token_rows
    num_accepted = chains.count_accepted((best[rows] == drafts.token_ids) & finite[rows])
    deciding = chains.first_rows + num_accepted
    return _verification(num_accepted, best[deciding], ~finite[deciding])


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


def _verify_mixed(
    logits: Tensor,
    drafts: DraftTokens,
    chains: _Chains,
    parameters: RowParameters,
    keys: DrawKeys,
    sampled: Tensor,
) -> Verification:
    """Greedy and sampled requests each as a batch of their own."""
    result = Verification(
        num_accepted=torch.empty(len(sampled), dtype=torch.int32, device=logits.device),
        next_token_ids=torch.empty(len(sampled), dtype=torch.int32, device=logits.device),
        failed=torch.empty_like(sampled),
    )
    for chosen in (sampled, ~sampled):
        requests = chosen.nonzero()[:, 0]
        part = verify_rejection(
            logits[chosen.repeat_interleave(chains.lengths + 1, output_size=len(logits))],
            _drafts_of(drafts, chains, chosen),
            RowParameters(
                temperature=parameters.temperature[requests],
                top_k=parameters.top_k[requests],
                top_p=parameters.top_p[requests],
                min_p=parameters.min_p[requests],
            ),
            _keys_of(keys, requests),
            vocab_size=logits.shape[1],
        )
        result.num_accepted[requests] = part.num_accepted
        result.next_token_ids[requests] = part.next_token_ids
        result.failed[requests] = part.failed
    return result


def _verification(num_accepted: Tensor, next_tokens: Tensor, failed: Tensor) -> Verification:
    return Verification(
        num_accepted=num_accepted.masked_fill(failed, 0).int(),
        next_token_ids=next_tokens.masked_fill(failed, NO_TOKEN).int(),
        failed=failed,
    )


@dataclass(frozen=True)
class _DraftLaw:
    """q of every draft token, sparse as it came."""

    exists: Tensor  # bool [N], False for a rejected id that comes without a law
    one_hot: Tensor  # bool [N], all the mass on the token itself
    of_tokens: Tensor  # float32 [N], q of the draft token
    entry_owners: Tensor  # int64 [M], the draft token of each support entry
    of_entries: Tensor  # float32 [M]

    @classmethod
    def of(cls, drafts: DraftTokens, chains: _Chains, vocab_size: int) -> _DraftLaw:
        """Normalises the weights, and refuses a law that cannot have produced its token."""
        weights = drafts.support_weights.float()
        if bool((~((weights >= 0) & (weights <= 1))).any()):
            raise ValueError("support_weights: give finite weights from 0 to 1")
        tokens, entries = len(drafts.token_ids), len(weights)
        ends = drafts.cu_support.long()
        sizes = ends.diff()
        if len(sizes) != tokens or int(ends[0]) != 0 or int(ends[-1]) != entries:
            raise ValueError(
                f"cu_support: {len(sizes)} slices of {entries} entries are not usable; "
                f"there are {tokens} draft tokens, and the last slice ends where the entries do"
            )
        one_hot = drafts.deterministic[chains.owners]
        if entries == 0:
            own = one_hot.float()
            owners, q = sizes.new_empty(0), weights
        else:
            numbers = torch.arange(tokens, device=ends.device)
            owners = numbers.repeat_interleave(sizes, output_size=entries)
            zeros = weights.new_zeros(tokens)
            # Multiples of 2**-24 that sum to at most 1: exact in float32, in every order.
            q = weights / zeros.index_add(0, owners, weights)[owners]
            mine = drafts.support_ids == drafts.token_ids[owners]
            own = zeros.index_add(0, owners, q.masked_fill(~mine, 0))
            own = own.masked_fill(one_hot, 1)
        exists = own > 0
        lawless = ~exists & (drafts.token_ids >= 0) & (drafts.token_ids < vocab_size)
        if bool(lawless.any()):
            worst = int(lawless.nonzero()[0])
            raise ValueError(
                f"token_ids[{worst}]: {int(drafts.token_ids[worst])} is not usable; its support "
                f"has {int(sizes[worst])} entries and no weight for it. Ship the law that the "
                "token was drawn from, or declare the drafts deterministic"
            )
        return cls(exists, one_hot, own, owners, q)


def _accepted(
    p: Tensor, law: _DraftLaw, drafts: DraftTokens, chains: _Chains, keys: DrawKeys
) -> Tensor:
    """bool [N], whether each draft token passes, whatever came before it."""
    if not len(drafts.token_ids):
        return torch.empty(0, dtype=torch.bool, device=p.device)
    ids = drafts.token_ids.long()
    exists = (ids >= 0) & (ids < p.shape[1])
    owners = chains.owners
    words, _ = random_words(
        keys.seeds[owners],
        keys.sample_indices[owners],
        keys.base_lengths[owners],
        keys.positions[owners] + chains.offsets,
        Purpose.ACCEPT,
    )
    p_of_tokens = p[chains.token_rows, ids.masked_fill(~exists, 0)]
    return exists & accepts(p_of_tokens, law.of_tokens, unit_interval(words))


def _next_weights(
    deciding: Tensor, law: _DraftLaw, drafts: DraftTokens, chains: _Chains, num_accepted: Tensor
) -> Tensor:
    """float32 [B, V], what the next token is drawn from: p after the last acceptance, (p - q)+
    after a rejection. A rejected id without a law counts as if nothing had been drafted."""
    if not len(drafts.token_ids):
        return deciding
    rejected = chains.offsets == num_accepted[chains.owners]  # [N], at most one a request
    hot = (rejected & law.one_hot).nonzero()[:, 0]
    spread = (rejected & law.exists & ~law.one_hot)[law.entry_owners].nonzero()[:, 0]
    rows = chains.owners[torch.cat((hot, law.entry_owners[spread]))]
    ids = torch.cat((drafts.token_ids[hot].long(), drafts.support_ids[spread].long()))
    q = torch.cat((law.of_tokens[hot], law.of_entries[spread]))
    inside = ((ids >= 0) & (ids < deciding.shape[1])).nonzero()[:, 0]
    if not len(inside):
        return deciding
    return residual(deciding, rows[inside], ids[inside], q[inside])


def _drafts_of(drafts: DraftTokens, chains: _Chains, chosen: Tensor) -> DraftTokens:
    tokens = chosen[chains.owners]
    sizes = drafts.cu_support.diff()
    entries = tokens.repeat_interleave(sizes.long(), output_size=len(drafts.support_ids))
    return DraftTokens(
        cu_num_draft_tokens=_running_sums(chains.lengths[chosen]),
        token_ids=drafts.token_ids[tokens],
        cu_support=_running_sums(sizes[tokens]),
        support_ids=drafts.support_ids[entries],
        support_weights=drafts.support_weights[entries],
        deterministic=drafts.deterministic[chosen],
    )


def _keys_of(keys: DrawKeys, requests: Tensor) -> DrawKeys:
    return DrawKeys(
        seeds=keys.seeds[requests],
        sample_indices=keys.sample_indices[requests],
        base_lengths=keys.base_lengths[requests],
        positions=keys.positions[requests],
    )


def _running_sums(sizes: Tensor) -> Tensor:
    sums = torch.zeros(len(sizes) + 1, dtype=torch.int32, device=sizes.device)
    sums[1:] = sizes.cumsum(0)
    return sums
