"""Ahead-of-time graphs for small rounds: one per bucket of packed tokens, weights packed in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Graph:
    """A compiled forward pass of exactly `rows` packed tokens."""

    rows: int
    run: Forward


class CompiledBuckets:
    """The graphs that are ready; whatever fits none runs eagerly.

    A frozen graph holds a packed copy of the weights and takes about half a minute to compile in
    every process, so that there are few buckets.
    """

    def __init__(self, buckets: tuple[int, ...]) -> None:
        self.buckets = buckets
        self._graphs: list[Graph] = []  # by rising rows

    def graph_for(self, rows: int) -> Graph | None:
        """The smallest ready graph that holds so many rows."""
        return next((graph for graph in self._graphs if graph.rows >= rows), None)

    def compile(self, forward: Forward, rows: int, example: tuple[Tensor, Tensor]) -> None:
        """Compiles a bucket by running it once."""
        import torch._inductor.config as inductor

        began = time.monotonic()
        graph = torch.compile(forward, fullgraph=True, dynamic=False)
        with torch.no_grad(), inductor.patch(freezing=True):
            graph(*example)
        self._graphs.append(Graph(rows, graph))
        self._graphs.sort(key=lambda held: held.rows)
        logger.info("compiled %d rows in %.0f s", rows, time.monotonic() - began)
