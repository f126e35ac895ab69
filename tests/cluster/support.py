"""A tiny random target with its tokenizer and head on disk, and a gateway around a real engine.

The target has 61 words in 64 rows, 8 layers and room for long answers; texts are the words
w0 to w60.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from outrider.cluster.config import ServiceConfig, load_config
from outrider.cluster.errors import Unavailable
from outrider.cluster.gateway import Gateway, GatewayServer
from outrider.cluster.loading import engine_config, target_config
from outrider.cluster.status import ServiceStatus
from outrider.cluster.verifiers import VerifierLost
from outrider.drafter.checkpoint import save_head
from outrider.protos.messages import FeatureSpec
from outrider.verifier.actor import VerifierActor
from outrider.verifier.engine import Engine
from outrider.verifier.link import NullLink
from outrider.verifier.target import Target
from outrider.verifier.types import GenerationRequest, TokenOutput
from tests.drafter.heads import tiny_head
from tests.models import WORDS, tiny_model

POSITIONS = 2048
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w1"


def save_target(folder: Path) -> None:
    """Writes the target, with room for long answers, and its tokenizer."""
    model = tiny_model()
    model.config.max_position_embeddings = POSITIONS
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def save_tiny_head(folder: Path, **changes: Any) -> None:
    """Writes a head that fits the target, but for the changes."""
    folder.mkdir(exist_ok=True)
    save_head(tiny_head(**{"max_position_embeddings": POSITIONS, **changes}), folder)


def tiny_config(models: Path, **overrides: object) -> ServiceConfig:
    """A service of the tiny parts on a free port, with little memory and one thread each."""
    fields: dict[str, object] = {
        "target.path": str(models / "target"),
        "target.dtype": "float32",
        "target.kv_bytes": 8 * 2**20,
        "draft.head": str(models / "head"),
        "draft.deadline_ms": 5000.0,
        "gateway.port": 0,
        "resources.verifier_threads": 1,
        "resources.drafter_cpus": 0.5,
        "resources.verifier_cpus": 0.5,
        "control.start_timeout_s": 120.0,
    }
    return load_config(None, {**fields, **overrides})


class LocalVerifier:
    """A verifier in this process, as the gateway sees one.

    `engine` is its VerifierActor; `lost` makes every further call fail as a dead actor's would.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.lost = False

    async def submit(self, gateway: str, requests: Sequence[GenerationRequest]) -> list[Any]:
        self._check()
        return await asyncio.to_thread(self.engine.submit, gateway, list(requests))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        self._check()
        await asyncio.to_thread(self.engine.cancel, list(request_ids))

    async def next_outputs(self, gateway: str, timeout_s: float) -> list[TokenOutput]:
        timeout_s = min(timeout_s, 0.1)  # a thread cannot be cancelled
        outputs: list[TokenOutput] = await asyncio.to_thread(
            self.engine.next_outputs, gateway, timeout_s
        )
        self._check()
        return outputs

    def _check(self) -> None:
        if self.lost:
            raise VerifierLost("it was killed")


class SlowLink(NullLink):
    """Makes every round take `pause_s` more; set `pause_s` at any time."""

    def __init__(self) -> None:
        self.pause_s = 0.0

    def take_feature_spec(self) -> FeatureSpec | None:
        time.sleep(self.pause_s)
        return None


class NoControl:
    """The control plane of a gateway that stands alone."""

    async def status(self) -> ServiceStatus:
        raise Unavailable("there is no controller here")

    async def scale(self, drafters: int | None, verifiers: int | None) -> tuple[int, int]:
        raise Unavailable("there is no controller here")


@dataclass
class Door:
    """A gateway with everything behind it in reach."""

    address: str
    server: GatewayServer
    verifier: LocalVerifier
    link: SlowLink

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    @property
    def rounds(self) -> int:
        return int(self.verifier.engine.status()["rounds"])

    @property
    def running(self) -> int:
        status = self.verifier.engine.status()
        return int(status["running"]) + int(status["waiting"])

    async def idle(self, limit_s: float = 5.0) -> None:
        """Waits until the engine and the gateway hold no request."""
        async with asyncio.timeout(limit_s):
            while self.running or self.gateway.in_flight:
                await asyncio.sleep(0.01)


def start_engine(config: ServiceConfig, link: NullLink) -> VerifierActor:
    """A running engine in this process."""
    return VerifierActor(
        lambda: Engine(Target.load(target_config(config)), engine_config(config, "v"), link)
    )
