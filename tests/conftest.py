"""Fixtures shared by the tests of the service: tiny parts on disk, a small Ray, a gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import ray
import torch

from outrider.cluster.encoder import TokenizerEncoder
from outrider.cluster.gateway import Gateway, GatewayServer
from outrider.cluster.requests import Limits
from tests.cluster.support import (
    POSITIONS,
    Door,
    LocalVerifier,
    NoControl,
    SlowLink,
    save_target,
    save_tiny_head,
    start_engine,
    tiny_config,
)
from tests.models import WORDS


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `head`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    save_target(folder / "target")
    save_tiny_head(folder / "head")
    return folder


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One small Ray for the session; never the cluster that an address file names."""
    ray.init(
        address="local",
        namespace="outrider",
        num_cpus=4,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    yield
    ray.shutdown()


@pytest.fixture
async def door(models: Path, request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    """A door; indirect parameters override fields of the gateway's configuration."""
    overrides = {f"gateway.{name}": value for name, value in getattr(request, "param", {}).items()}
    config = tiny_config(models, **overrides)
    link = SlowLink()
    engine = start_engine(config, link)
    limits = Limits(WORDS, POSITIONS, config.gateway.max_stop_strings)
    encoder = TokenizerEncoder(engine.tokenizer)
    server = GatewayServer(Gateway(config.gateway, limits, encoder), NoControl())
    port = await server.start()
    verifier = LocalVerifier(engine)
    server.gateway.add_verifier("v", verifier)
    await server.set_serving(True)
    yield Door(f"127.0.0.1:{port}", server, verifier, link)
    link.pause_s = 0.0
    await server.stop(0.0)
    engine.shutdown()
