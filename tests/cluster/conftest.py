"""The tiny parts on disk, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.support import save_target, save_tiny_head


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `head`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    save_target(folder / "target")
    save_tiny_head(folder / "head")
    return folder
