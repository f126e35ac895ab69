"""The head's key-value cache, in blocks, for many requests of different lengths.

A sequence owns whole blocks of a shared pool. Rows are written by absolute position, so writing
a position again replaces it: that is how drafted rows, which rest on the head's own guesses,
give way to rows made from the target's features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class CacheFull(RuntimeError):
    """No block is left for a sequence; it is served without drafts."""


@dataclass
class Sequence:
    """blocks: pool indices in order of position; length: rows that rest on true features."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Layout:
    """Where a ragged batch of T new rows lies; made once a forward.

    slots [T] int64, pool rows the new keys go to; gather [B, L] int64, pool rows of each
    sequence, padded with any row; query_index [B, Q] int64, rows of the batch per sequence, padded;
    query_of_row [T] int64, the place of each row in the padded [B * Q]; mask [B, 1, Q, L] bool,
    true where a query may look.
    """

    slots: Tensor
    gather: Tensor
    query_index: Tensor
    query_of_row: Tensor
    mask: Tensor


class HeadCache:
    """One pool of `blocks` x `block_size` rows: keys and values [rows, g, D]."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (blocks * block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.free = list(range(blocks - 1, -1, -1))
        self.total = blocks

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Makes room for positions below `length`.

        Raises:
            CacheFull: the pool has too few blocks; nothing was taken.
        """
        wanted = -(-length // self.block_size) - len(sequence.blocks)
        if wanted > len(self.free):
            raise CacheFull(f"{wanted} more head cache blocks wanted, {len(self.free)} free")
        for _ in range(wanted):
            sequence.blocks.append(self.free.pop())

    def release(self, sequence: Sequence) -> None:
        """Returns a sequence's blocks."""
        self.free.extend(sequence.blocks)
        sequence.blocks.clear()
        sequence.length = 0

    def layout(self, sequences: list[Sequence], starts: list[int], counts: list[int]) -> Layout:
        """Row b.j of the batch is position starts[b] + j of sequence b, for j < counts[b]."""
        device, size = self.keys.device, self.block_size
        longest = max(s + c for s, c in zip(starts, counts, strict=True))
        width = -(-longest // size)
        tables = torch.tensor(
            [(s.blocks + [0] * width)[:width] for s in sequences], dtype=torch.long, device=device
        )
        rows = (tables[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        first = torch.tensor(starts, device=device)
        number = torch.tensor(counts, device=device)
        offset = torch.arange(int(max(counts)), device=device)
        real = offset < number[:, None]  # [B, Q]
        positions = first[:, None] + offset  # [B, Q]
        ends = number.cumsum(0)
        query_index = (ends - number)[:, None] + torch.minimum(offset, number[:, None] - 1)
        gather = rows[:, :longest]
        visible = torch.arange(longest, device=device) <= positions[:, :, None]
        return Layout(
            slots=gather.gather(1, positions.clamp(max=longest - 1))[real],
            gather=gather,
            query_index=query_index,
            query_of_row=real.flatten().nonzero()[:, 0],
            mask=visible[:, None],
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Writes the new rows, then lets each query read its own sequence.

        Args:
            q: [T, h, D]; k, v: [T, g, D].

        Returns:
            [T, h*D].
        """
        self.keys[layout.slots] = k
        self.values[layout.slots] = v
        batch = layout.gather.shape[0]
        queries = layout.query_index.shape[1]
        heads, width = q.shape[1:]
        groups = k.shape[1]
        keys = self.keys[layout.gather].transpose(1, 2)  # [B, g, L, D]
        values = self.values[layout.gather].transpose(1, 2)
        share = heads // groups
        # The query heads of one key head are folded into the query axis: keys are not copied.
        padded = q[layout.query_index]  # [B, Q, h, D]
        folded = padded.view(batch, queries, groups, share, width).permute(0, 2, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(
            folded.reshape(batch, groups, share * queries, width),
            keys,
            values,
            attn_mask=layout.mask.repeat(1, 1, share, 1),
        )
        out = out.view(batch, groups, share, queries, width).permute(0, 3, 1, 2, 4)
        return out.reshape(batch * queries, heads * width)[layout.query_of_row]

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Every block is free or owned once.

        Raises:
            AssertionError: the books do not balance.
        """
        held = [block for sequence in sequences for block in sequence.blocks]
        assert sorted(held + self.free) == list(range(self.total)), "head cache blocks lost"
