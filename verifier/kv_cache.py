"""Keys and values of all requests in blocks of equal size, and who owns which block.

Axes: N blocks of P slots each (one slot holds one position), G key-value heads, D head size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.protos.sampling import InvalidField

SCRATCH = 0  # padding rows write here; no request ever owns it


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


@dataclass(frozen=True)
class KVShape:
    """What one position of a target takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def plan_blocks(shape: KVShape, kv_bytes: int, block_size: int, max_context: int) -> int:
    """Blocks that fit a budget, the scratch block included.

    Raises:
        InvalidField: a budget in which one request of full length would not fit. With room for
            one, the oldest request can always go on once the others were preempted.
    """
    block_bytes = shape.bytes_per_token * block_size
    least = 1 + -(-max_context // block_size)
    blocks = kv_bytes // block_bytes
    if blocks < least:
        raise InvalidField(
            "kv_bytes",
            kv_bytes,
            f"give at least {least * block_bytes} for a context of {max_context}, or lower "
            "max_context",
        )
    return blocks


class KVPool:
    """The tensors: a layer's keys and values side by side, so that one gather reads both."""

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        self.slots = [  # each [N*P, 2, G, D]
            torch.zeros(
                slots, 2, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device
            )
            for _ in range(shape.num_layers)
        ]
        self.blocks = [layer.view(num_blocks, -1) for layer in self.slots]  # each [N, P*2*G*D]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.num_blocks * self.block_size * self.shape.bytes_per_token

    def clear(self, blocks: Sequence[int]) -> None:
        """Forgets what blocks hold: masked positions are multiplied by zero, and 0 * NaN is NaN."""
        index = torch.tensor(blocks, dtype=torch.long, device=self.slots[0].device)
        for layer in self.blocks:
            layer.index_fill_(0, index, 0.0)

    def read(self, layer: int, blocks: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `length` keys and values, each [length, G, D]."""
        index = torch.tensor(blocks, dtype=torch.long, device=self.slots[0].device)
        shape = self.shape
        held = self.blocks[layer].index_select(0, index)
        held = held.view(-1, 2, shape.num_kv_heads, shape.head_dim)[:length]
        return held[:, 0].contiguous(), held[:, 1].contiguous()


class BlockAllocator:
    """Hands out block numbers, lowest first and in runs where it can."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks))  # rising; the scratch block is never free

    @property
    def total(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that are owned."""
        return self.total - self.free

    def extend(self, blocks: list[int], count: int) -> None:
        """Adds `count` blocks to a table, all or none.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        for _ in range(count):
            at = bisect.bisect_left(self._free, blocks[-1] + 1) if blocks else 0
            blocks.append(self._free.pop(at if at < len(self._free) else 0))

    def release(self, blocks: list[int]) -> None:
        """Takes back a table's blocks and empties it."""
        for block in blocks:
            at = bisect.bisect_left(self._free, block)
            assert at == len(self._free) or self._free[at] != block, f"block {block} freed twice"
            self._free.insert(at, block)
        blocks.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block is free or in exactly one table."""
        owned = [block for table in tables for block in table]
        everything = sorted(owned + self._free)
        assert everything == list(range(1, self.num_blocks)), (
            f"blocks owned {sorted(owned)}, free {self._free}, of {self.total}"
        )
