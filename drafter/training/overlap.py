"""Proof that a head never saw a text: fingerprints of its training prompts.

A fingerprint file holds a sample of the 64-bit hashes of all runs of eight words, chosen by the
hash itself (winnowing: Schleimer et al., SIGMOD 2003), so that the same run is kept wherever it
stands. It is small enough to ship with the head, and says nothing readable of the prompts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

RUN = 8  # words
_KEPT = 8  # one hash in so many


def fingerprints(texts: Iterable[str]) -> set[int]:
    """The kept hashes of all runs of words; case and punctuation do not count."""
    kept: set[int] = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        for start in range(len(words) - RUN + 1):
            run = " ".join(words[start : start + RUN])
            value = int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "big")
            if value % _KEPT == 0:
                kept.add(value)
    return kept


def write_fingerprints(texts: Iterable[str], path: Path) -> None:
    """Writes the sorted hashes as `.npy`, uint64."""
    np.save(path, np.array(sorted(fingerprints(texts)), dtype=np.uint64))


def read_fingerprints(path: Path) -> set[int]:
    """The hashes of a file written by `write_fingerprints`."""
    return {int(value) for value in np.load(path, allow_pickle=False)}
