"""From a configuration to loaded parts. Called inside actors; imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from outrider.cluster.config import ConfigError, ServiceConfig
from outrider.cluster.encoder import TokenizerEncoder
from outrider.cluster.links import InProcessDraftLink, LinkStats, RayDraftLink
from outrider.cluster.placement import Handle
from outrider.cluster.status import EngineTotals, LinkTotals
from outrider.drafter.checkpoint import load_head
from outrider.drafter.eagle import DraftSettings, Eagle3Drafter
from outrider.drafter.embedding import read_embedding
from outrider.kernels.dispatch import sampler_for
from outrider.protos.sampling import InvalidField, SamplingParameters
from outrider.verifier.actor import VerifierActor
from outrider.verifier.device import own_device
from outrider.verifier.engine import Engine
from outrider.verifier.link import DraftLink, NullLink
from outrider.verifier.loading import find, load_model, load_tokenizer
from outrider.verifier.target import Target
from outrider.verifier.types import EngineConfig, GenerationRequest, TargetConfig

BLOCK = 32  # rows of a block of the head's cache


def load_drafter(config: ServiceConfig, sender: str) -> tuple[Eagle3Drafter, dict[str, Any]]:
    """The head with the target's embedding table, and what it runs on."""
    folder = Path(config.draft.head)
    if not (folder / "config.json").is_file():
        raise ConfigError("draft.head", config.draft.head, "name a folder with config.json")
    device = own_device()
    dtype = getattr(torch, chosen_dtype(config.target.dtype))
    drafter = Eagle3Drafter(
        load_head(folder, None, dtype),
        read_embedding(local_files(config.target.path), dtype),
        DraftSettings(
            tail=config.draft.tail,
            max_support=config.draft.max_support,
            cache_blocks=-(-config.draft.cache_tokens // BLOCK),
            block_size=BLOCK,
            max_requests=config.draft.max_requests,
        ),
        device,
        service=config.service,
        sender=sender,
    )
    return drafter, {"device": str(device), "sampler": drafter.sampler.name}


def load_link(config: ServiceConfig, drafters: Mapping[str, Handle]) -> DraftLink:
    """The way to the drafters that the configuration asks for."""
    if config.placement == "none":
        return NullLink()
    if config.placement == "colocated":
        return InProcessDraftLink(load_drafter(config, "colocated")[0])
    return RayDraftLink(
        drafters,
        attach_timeout_s=config.control.call_timeout_s,
        max_in_flight=config.draft.max_in_flight,
        max_in_flight_bytes=config.draft.max_in_flight_bytes,
    )


def engine_config(config: ServiceConfig, sender: str) -> EngineConfig:
    """The engine's own settings."""
    return EngineConfig(
        num_speculative_tokens=(
            0 if config.placement == "none" else config.draft.num_speculative_tokens
        ),
        max_context=config.target.max_context,
        kv_bytes=config.target.kv_bytes,
        prefill_chunk=config.target.prefill_chunk,
        max_batch=config.target.max_batch,
        max_waiting=config.target.max_waiting,
        draft_deadline_s=config.draft.deadline_ms / 1000,
        service=config.service,
        sender=sender,
    )


def target_config(config: ServiceConfig) -> TargetConfig:
    """The target's own settings."""
    return TargetConfig(
        path=config.target.path,
        dtype=chosen_dtype(config.target.dtype),
        compile=config.target.compile,
    )


def load_verifier(
    config: ServiceConfig, drafters: Mapping[str, Handle], sender: str, threads: int
) -> tuple[VerifierActor, DraftLink, dict[str, Any]]:
    """The running engine, its link, and what the service needs to know about it."""
    facts: dict[str, Any] = {}
    links: list[DraftLink] = []

    def build() -> Engine:
        torch.set_num_threads(threads)
        links.append(load_link(config, drafters))
        target = Target.load(target_config(config))
        engine = Engine(target, engine_config(config, sender), links[0])
        target.warm_up()
        facts.update(
            device=str(target.device),
            sampler=sampler_for(target.device).name,
            vocab_size=target.vocab_size,
            max_context=engine.max_context,
        )
        return engine

    verifier = VerifierActor(build)
    return verifier, links[0], facts


def verifier_status(verifier: VerifierActor, link: DraftLink) -> dict[str, Any]:
    """The numbers of an engine and its link, for the controller."""
    numbers = verifier.status()
    moved = link.stats if isinstance(link, RayDraftLink) else LinkStats()
    names = {item.name for item in dataclasses.fields(EngineTotals)} & numbers.keys()
    totals = EngineTotals(
        **{
            **{name: numbers[name] for name in names},
            "draft_bytes": moved.draft_bytes,
            "verdict_bytes": moved.verdict_bytes,
            "link": LinkTotals(
                lost_drafters=moved.lost_drafters,
                abandoned_requests=moved.abandoned_requests,
                malformed_messages=moved.malformed_messages,
                overflows=moved.overflows,
            ),
        }
    )
    return {
        "totals": totals,
        "running_requests": numbers["running"],
        "waiting_requests": numbers["waiting"],
        "kv_blocks_used": numbers["kv_blocks_used"],
        "kv_blocks_total": numbers["kv_blocks_total"],
        "requests_per_drafter": (
            link.requests_per_drafter if isinstance(link, RayDraftLink) else {}
        ),
    }


def plain_and_drafted(
    config: ServiceConfig, message: str, max_tokens: int
) -> tuple[list[int], list[int]]:
    """One greedy answer to a chat message, decoded plainly and with drafts, in this process."""
    target = Target.load(target_config(config))
    engine = Engine(target, engine_config(config, "check"), load_link(config, {}))
    encoder = TokenizerEncoder(target.tokenizer)
    prompt = tuple(encoder.render([("user", message)]))
    answers: list[list[int]] = []
    for number, drafts in enumerate((0, None)):
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=prompt,
                parameters=SamplingParameters(temperature=0.0),
                max_tokens=max_tokens,
                seed=0,
                num_speculative_tokens=drafts,
            )
        )
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        answers.append([token for output in outputs for token in output.token_ids])
    return answers[0], answers[1]


def load_training_target(path: str) -> tuple[Any, Any]:
    """A target and its tokenizer as `train-head` takes them: with ordinary attention.

    Raises:
        InvalidField: a path that cannot be served, or a target without a tokenizer.
    """
    dtype = chosen_dtype("auto")
    model = load_model(TargetConfig(path=path, dtype=dtype), own_device())
    model.set_attn_implementation("sdpa")
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise InvalidField("target", path, "training needs its tokenizer beside it")
    return model, tokenizer


def load_encoder(config: ServiceConfig) -> TokenizerEncoder | None:
    """The target's tokenizer, if it has one."""
    tokenizer = load_tokenizer(config.target.path)
    return None if tokenizer is None else TokenizerEncoder(tokenizer)


def local_files(path: str) -> Path:
    """The folder or file that a target path stands for; fetches a hub id's safetensors."""
    source = find(path)
    place = Path(source.name) if source.gguf is None else Path(source.name) / source.gguf
    if place.exists():
        return place
    return Path(snapshot_download(source.name, allow_patterns=["*.json", "*.safetensors"]))


def chosen_dtype(name: str) -> str:
    """What "auto" means on this machine: bfloat16 unless the processor has to emulate it."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "bfloat16"
    able = torch.cpu.get_capabilities()
    fast = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if fast else "float32"
