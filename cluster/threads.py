"""Compute threads of an actor's process; to be called before torch is imported there."""

from __future__ import annotations

import os

from outrider.cluster.config import Environment


def use_threads(count: int) -> int:
    """Gives torch and OpenMP `count` threads, or one per core for 0; returns the number.

    OpenMP reads its variables once, when torch loads it, and Ray's own default is one thread per
    CPU that the actor asked for.
    """
    threads = count or Environment.read().cores
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    return threads
