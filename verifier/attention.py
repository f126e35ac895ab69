"""Attention of a packed, ragged batch over keys and values in blocks.

All requests' new tokens stand in one row of T tokens. Segments of few rows (decoding) share one
batched call, padded to their longest; each prefill chunk has a call of its own. Everything that
depends on lengths alone is computed once a forward pass, in `plan_attention`.

Axes: T packed rows, R segments of a group, Q rows a segment, L keys, H query heads, G key-value
heads, F = H / G queries a key head, D head size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.verifier.kv_cache import SCRATCH, KVPool

NAME = "outrider_paged"
MAX_GROUP_ROWS = 32  # segments with more rows are prefill chunks
MIN_SPREAD = 8  # blocks; groups of shorter contexts are not split further


@dataclass(frozen=True)
class Segment:
    """Consecutive new tokens of one request: `rows` of them, ending a context of `context`."""

    rows: int
    context: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Rows:
    """Packed rows: a slice where they stand together, else an index."""

    start: int
    stop: int
    index: Tensor | None  # [stop - start]

    def take(self, packed: Tensor) -> Tensor:
        """packed [T, ...] -> the rows."""
        if self.index is None:
            return packed[self.start : self.stop]
        return packed.index_select(0, self.index)

    def put(self, packed: Tensor, values: Tensor) -> None:
        """Writes the rows of packed [T, ...]."""
        if self.index is None:
            packed[self.start : self.stop].copy_(values)
        else:
            packed.index_copy_(0, self.index, values)


@dataclass(frozen=True)
class Group:
    """Segments attended together.

    queries: their packed rows, [R*Q] with short segments filled up by repeating a row.
    outputs: where results belong; picked: which of the R*Q results those are, None for all.
    table: [R * blocks] of the pool, or None where the blocks are the run starting at slot
    `first`. mask: [R, 1, Q*F, L] added to the scores, None where every key is seen. causal: a
    first prefill chunk, whose keys are its own rows.
    """

    size: int
    rows: int
    keys: int
    queries: Rows
    outputs: Rows
    picked: Tensor | None
    table: Tensor | None
    first: int
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class AttentionPlan:
    """What attention needs to know of one forward pass.

    slots: where new keys go, [T]. whole: one group holds all rows in their packed order.
    """

    rows: int
    slots: Rows
    groups: tuple[Group, ...]
    whole: bool


def plan_attention(
    segments: Sequence[Segment],
    padding: int,
    block_size: int,
    heads_per_key: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Lays out a pass over the segments, in packed order, and `padding` ignored rows behind."""
    starts = list(itertools.accumulate((s.rows for s in segments), initial=0))
    slots: list[int] = []
    for segment in segments:
        for position in range(segment.context - segment.rows, segment.context):
            slots.append(
                segment.blocks[position // block_size] * block_size + position % block_size
            )
    slots += [SCRATCH * block_size] * padding
    members: dict[tuple[bool, int], list[int]] = {}
    for number, segment in enumerate(segments):
        if segment.rows > MAX_GROUP_ROWS:
            members[(True, number)] = [number]
        else:
            spread = max(-(-segment.context // block_size), MIN_SPREAD)
            members.setdefault((False, (spread - 1).bit_length()), []).append(number)
    groups = []
    for (chunk, _), numbers in members.items():
        held = [segments[n] for n in numbers]
        first_rows = [starts[n] for n in numbers]
        groups.append(_group(held, first_rows, chunk, block_size, heads_per_key, dtype, device))
    whole = len(groups) == 1 and groups[0].outputs.index is None and not padding
    return AttentionPlan(len(slots), _rows(slots, device), tuple(groups), whole)


def _group(
    segments: Sequence[Segment],
    first_rows: Sequence[int],
    chunk: bool,
    block_size: int,
    heads_per_key: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    size, rows = len(segments), max(s.rows for s in segments)
    keys = max(s.context for s in segments)
    causal = chunk and segments[0].context == rows
    queries: list[int] = []
    outputs: list[int] = []
    picked: list[int] = []
    table: list[int] = []
    blocks = -(-keys // block_size)
    for number, (segment, first) in enumerate(zip(segments, first_rows, strict=True)):
        queries += [first + min(row, segment.rows - 1) for row in range(rows)]
        outputs += range(first, first + segment.rows)
        picked += range(number * rows, number * rows + segment.rows)
        own = list(segment.blocks[:blocks])
        table += own + [SCRATCH] * (blocks - len(own))
    run = size == 1 and table == list(range(table[0], table[0] + blocks))
    mask = None
    if not causal and (rows > 1 or size > 1):
        ends = torch.tensor([s.context - s.rows for s in segments]).view(-1, 1, 1)
        last = torch.tensor([s.context - 1 for s in segments]).view(-1, 1, 1)
        seen = torch.minimum(ends + torch.arange(rows).view(1, -1, 1), last)  # [R, Q, 1]
        hidden = torch.arange(keys) > seen  # [R, Q, L]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if not chunk:
            mask = mask.repeat_interleave(heads_per_key, dim=1)
        mask = mask.unsqueeze(1).to(device)
    return Group(
        size=size,
        rows=rows,
        keys=keys,
        queries=_rows(queries, device),
        outputs=_rows(outputs, device),
        picked=None if len(picked) == size * rows else torch.tensor(picked, device=device),
        table=None if run else torch.tensor(table, device=device),
        first=table[0] * block_size,
        mask=mask,
        causal=causal,
    )


def _rows(numbers: list[int], device: torch.device) -> Rows:
    start, stop = numbers[0], numbers[0] + len(numbers)
    if numbers == list(range(start, stop)):
        return Rows(start, stop, None)
    return Rows(0, len(numbers), torch.tensor(numbers, device=device))


class AttentionPlane:
    """One target's keys and values, and the plan of the pass that is under way.

    A compiled graph can hand its operators tensors and numbers only, so that each plane has a
    number under which `attend_op` finds it.
    """

    _serials = itertools.count()
    _planes: ClassVar[weakref.WeakValueDictionary[int, AttentionPlane]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.plan: AttentionPlan | None = None
        self.number = next(self._serials)
        self._planes[self.number] = self

    @classmethod
    def find(cls, number: int) -> AttentionPlane:
        """The plane with a number; whoever asks is inside one of its passes."""
        return cls._planes[number]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Writes a layer's new keys and values and attends to the old ones too.

        Args:
            query: [1, H, T, D]; key, value: [1, G, T, D].

        Returns:
            [1, T, H, D].
        """
        plan = self.plan
        assert plan is not None and plan.rows == query.shape[2]
        slots = self.pool.slots[layer]
        new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
        plan.slots.put(slots, new)  # [T, 2, G, D]
        packed = query[0].transpose(0, 1)  # [T, H, D]
        if plan.whole:
            return self._attend_group(plan.groups[0], layer, packed, scale).unsqueeze(0)
        out = torch.zeros(packed.shape, dtype=packed.dtype, device=packed.device)
        for group in plan.groups:
            group.outputs.put(out, self._attend_group(group, layer, packed, scale))
        return out.unsqueeze(0)

    def _attend_group(self, group: Group, layer: int, packed: Tensor, scale: float) -> Tensor:
        """[outputs of the group, H, D]."""
        key, value = self._context(group, layer)  # [R, L, G, D]
        size, rows, heads, dim = group.size, group.rows, self.num_heads, packed.shape[2]
        key_heads = key.shape[2]
        query = group.queries.take(packed)  # [R*Q, H, D]
        if group.rows > MAX_GROUP_ROWS:
            # Query heads of one key head stand beside each other, and share it without a copy.
            split = query.view(rows, key_heads, -1, dim).permute(1, 2, 0, 3)  # [G, F, Q, D]
            shared = (key_heads, heads // key_heads, group.keys, dim)
            out = F.scaled_dot_product_attention(
                split,
                key[0].transpose(0, 1).unsqueeze(1).expand(shared),
                value[0].transpose(0, 1).unsqueeze(1).expand(shared),
                attn_mask=group.mask,
                is_causal=group.causal,
                scale=scale,
            )
            return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)
        # Queries of one key head stand below each other: keys are read once for all of them.
        folded = query.view(size, rows, key_heads, -1, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            folded.reshape(size, key_heads, -1, dim),  # [R, G, Q*F, D]
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        )
        out = out.view(size, key_heads, rows, -1, dim).transpose(1, 2)
        out = out.reshape(size * rows, heads, dim)
        return out if group.picked is None else out.index_select(0, group.picked)

    def _context(self, group: Group, layer: int) -> tuple[Tensor, Tensor]:
        if group.table is None:
            held = self.pool.slots[layer][group.first : group.first + group.keys].unsqueeze(0)
        else:
            held = self.pool.blocks[layer].index_select(0, group.table)
            held = held.view(group.size, -1, *self.pool.slots[layer].shape[1:])[:, : group.keys]
        return held[:, :, 0], held[:, :, 1]


@torch.library.custom_op("outrider::attend", mutates_args=())
def attend_op(
    query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int, plane: int
) -> Tensor:
    """`AttentionPlane.attend` as one operator that a compiler does not look into."""
    return AttentionPlane.find(plane).attend(layer, query, key, value, scale).contiguous()


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int, plane: int) -> Tensor:
    heads, rows, dim = query.shape[1:]
    return query.new_empty(1, rows, heads, dim)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plane: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of a served model; the sliding window never binds, see Target."""
    layer: Any = module.layer_idx
    if torch.compiler.is_compiling():
        return attend_op(query, key, value, scaling, layer, plane), None
    return AttentionPlane.find(plane).attend(layer, query, key, value, scaling), None


def no_mask(*_: Any, **__: Any) -> None:
    """Which keys a row sees is in the plan."""


def register() -> None:
    """Makes the attention known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
