"""The configuration of a service: frozen records from a TOML file and overrides, without torch.

A file has one table a section and the service's name on top:

    service = "default"

    [target]
    path = "path/to/model"

    [draft]
    num_speculative_tokens = 2

An override names a field with its section, `draft.num_speculative_tokens`. Unknown names and
unusable values are refused, each with the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

PACKAGED_HEAD = Path(__file__).resolve().parent.parent / "drafter/heads/smollm2-135m-instruct"
DTYPES = ("auto", "bfloat16", "float32")
PLACEMENTS = ("remote", "colocated", "none")

Record = TypeVar("Record")


class ConfigError(ValueError):
    """A field that cannot be used; the text is one line with field, value and remedy."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        super().__init__(f"{name}: {value!r} is not usable; {remedy}")


class StartError(RuntimeError):
    """A service that cannot be started or scaled, or a head that cannot be trained; one line."""


def _check(name: str, value: object, usable: bool, remedy: str) -> None:
    if not usable:
        raise ConfigError(name, value, remedy)


def _at_least(name: str, value: int, least: int) -> None:
    _check(name, value, value >= least, f"give a whole number of at least {least}")


def _one_of(name: str, value: str, choices: Collection[str]) -> None:
    _check(name, value, value in choices, f"choose one of {', '.join(choices)}")


def _positive(name: str, value: float) -> None:
    _check(name, value, math.isfinite(value) and value > 0, "give a finite number above 0")


@dataclass(frozen=True)
class TargetConfig:
    """The served model.

    path: a folder with config.json and safetensors, a .gguf file, or a hub id.
    dtype: "auto" takes bfloat16 where the processor multiplies it fast, else float32.
    max_context: tokens of prompt and answer together; 0 takes the model's own limit.
    kv_bytes: memory for the paged KV cache. prefill_chunk: prompt tokens in one round at most.
    max_batch: requests in one round; max_waiting: requests queued behind them.
    compile: graphs made ahead for small rounds, "off" or "warmup"; about half a minute a graph
    at start, and 280 MB each for a small model.
    """

    path: str = ""
    dtype: str = "auto"
    max_context: int = 0
    kv_bytes: int = 512 * 2**20
    prefill_chunk: int = 256
    max_batch: int = 64
    max_waiting: int = 256
    compile: str = "off"

    def __post_init__(self) -> None:
        _one_of("target.dtype", self.dtype, DTYPES)
        _check(
            "target.max_context",
            self.max_context,
            self.max_context == 0 or self.max_context >= 2,
            "give at least 2, or 0 for the model's own limit",
        )
        _at_least("target.kv_bytes", self.kv_bytes, 2**16)
        _at_least("target.prefill_chunk", self.prefill_chunk, 1)
        _at_least("target.max_batch", self.max_batch, 1)
        _at_least("target.max_waiting", self.max_waiting, 0)
        _one_of("target.compile", self.compile, ("off", "warmup"))


@dataclass(frozen=True)
class DraftConfig:
    """The draft plane.

    placement: "remote" drafters are actors of their own; "colocated" runs the head inside the
    verifier; "none" decodes plainly. tail, max_support: the mass that a shipped draft law may
    leave out, and its most entries; 208 keep a message of two draft tokens under 1 KB a token.
    deadline_ms: how long a round waits for its drafts. max_in_flight, max_in_flight_bytes:
    unanswered messages to one drafter; past either, the requests of the message that does not fit
    go on undrafted. cache_tokens, max_requests: what one drafter holds for all verifiers.
    """

    placement: str = "remote"
    head: str = str(PACKAGED_HEAD)
    num_speculative_tokens: int = 2
    tail: float = 0.01
    max_support: int = 208
    deadline_ms: float = 250.0
    max_in_flight: int = 64
    max_in_flight_bytes: int = 64 * 2**20
    cache_tokens: int = 65536
    max_requests: int = 1024

    def __post_init__(self) -> None:
        _one_of("draft.placement", self.placement, PLACEMENTS)
        _check(
            "draft.head",
            self.head,
            bool(self.head) or self.placement == "none",
            'give the folder of a head, or draft.placement = "none"',
        )
        k = self.num_speculative_tokens
        _check("draft.num_speculative_tokens", k, 0 <= k <= 16, "give a whole number from 0 to 16")
        _check("draft.tail", self.tail, 0.0 <= self.tail < 1.0, "give a number in [0, 1)")
        _check(
            "draft.max_support",
            self.max_support,
            1 <= self.max_support <= 65535,
            "give a whole number from 1 to 65535",
        )
        _positive("draft.deadline_ms", self.deadline_ms)
        _at_least("draft.max_in_flight", self.max_in_flight, 2)
        _at_least("draft.max_in_flight_bytes", self.max_in_flight_bytes, 2**20)
        _at_least("draft.cache_tokens", self.cache_tokens, 32)
        _at_least("draft.max_requests", self.max_requests, 1)


@dataclass(frozen=True)
class CountsConfig:
    """Actors of each role at the start; `outrider scale` changes them later."""

    drafters: int = 1
    verifiers: int = 1

    def __post_init__(self) -> None:
        _at_least("counts.drafters", self.drafters, 1)
        _at_least("counts.verifiers", self.verifiers, 1)


@dataclass(frozen=True)
class ResourcesConfig:
    """What an actor asks of Ray, and its compute threads on a CPU.

    In lock-step a verifier sleeps while its drafter works, so that on one stream both may use
    all cores; with many streams keep the sum of the threads within the cores. 0 threads: as
    many as the machine has cores. labels: whether roles are placed by the node label
    `outrider-role`: "auto" if any node carries it, "always" or "never".
    """

    verifier_cpus: float = 1.0
    drafter_cpus: float = 1.0
    verifier_gpus: float = 0.0
    drafter_gpus: float = 0.0
    verifier_threads: int = 0
    drafter_threads: int = 1
    labels: str = "auto"

    def __post_init__(self) -> None:
        for name in ("verifier_cpus", "drafter_cpus", "verifier_gpus", "drafter_gpus"):
            value = getattr(self, name)
            _check(
                f"resources.{name}",
                value,
                math.isfinite(value) and value >= 0,
                "give a finite number of at least 0",
            )
        _at_least("resources.verifier_threads", self.verifier_threads, 0)
        _at_least("resources.drafter_threads", self.drafter_threads, 0)
        _one_of("resources.labels", self.labels, ("auto", "always", "never"))


@dataclass(frozen=True)
class GatewayConfig:
    """The gRPC door.

    port 0 takes a free one. admission_limit: requests in flight before RESOURCE_EXHAUSTED.
    stream_buffer: tokens that may wait for a slow reader before its request is cancelled.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    admission_limit: int = 256
    max_message_bytes: int = 16 * 2**20
    stream_buffer: int = 4096
    max_stop_strings: int = 16

    def __post_init__(self) -> None:
        _check("gateway.host", self.host, bool(self.host), "give a host name or address")
        _check("gateway.port", self.port, 0 <= self.port <= 65535, "give a port from 0 to 65535")
        _at_least("gateway.admission_limit", self.admission_limit, 1)
        _at_least("gateway.max_message_bytes", self.max_message_bytes, 1024)
        _at_least("gateway.stream_buffer", self.stream_buffer, 1)
        _at_least("gateway.max_stop_strings", self.max_stop_strings, 0)


@dataclass(frozen=True)
class ControlConfig:
    """Time limits of the control plane, in seconds, and whether actors outlive their driver."""

    start_timeout_s: float = 300.0
    call_timeout_s: float = 30.0
    health_interval_s: float = 1.0
    health_timeout_s: float = 10.0
    drain_timeout_s: float = 60.0
    detached: bool = False

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if item.name != "detached":
                _positive(f"control.{item.name}", getattr(self, item.name))


@dataclass(frozen=True)
class ServiceConfig:
    """Everything that a service is started with."""

    service: str = "default"
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    counts: CountsConfig = field(default_factory=CountsConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    control: ControlConfig = field(default_factory=ControlConfig)

    def __post_init__(self) -> None:
        _check(
            "service",
            self.service,
            re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.service) is not None,
            "give at most 40 lower-case letters, digits and inner dashes",
        )

    def replaced(self, overrides: Mapping[str, object]) -> ServiceConfig:
        """This configuration with `section.field` overrides; every value is checked again."""
        tables: dict[str, Any] = {}
        for key, value in overrides.items():
            section, _, name = key.rpartition(".")
            if section:
                tables.setdefault(section, {})[name] = value
            else:
                tables[name] = value
        return _updated(self, tables, "")

    @property
    def placement(self) -> str:
        """Where drafts come from; a service that asks for no draft tokens has no drafter."""
        return "none" if self.draft.num_speculative_tokens == 0 else self.draft.placement


def load_config(path: str | Path | None, overrides: Mapping[str, object]) -> ServiceConfig:
    """Reads a TOML file, if one is named, and applies the overrides to it."""
    config = ServiceConfig()
    if path is not None:
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("config file", str(path), f"it cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError("config file", str(path), f"mend its TOML: {error}") from error
        config = _updated(config, tables, "")
    return config.replaced(overrides)


def parse_override(text: str) -> tuple[str, object]:
    """`section.field=value`, the value as TOML writes it or, failing that, as a string."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError("--set", text, "write section.field=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return key.strip(), parsed


def _updated(record: Record, tables: Mapping[str, Any], prefix: str) -> Record:
    types_by_name = typing.get_type_hints(type(record))
    changes: dict[str, object] = {}
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if key not in types_by_name:
            raise ConfigError(name, value, _unknown(key, types_by_name, prefix))
        expected = types_by_name[key]
        if dataclasses.is_dataclass(expected):
            _check(name, value, isinstance(value, Mapping), f"write it as a table [{name}]")
            changes[key] = _updated(getattr(record, key), value, f"{name}.")
        else:
            changes[key] = _typed(name, value, expected)
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]


def _unknown(key: str, known: Collection[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"there is no such field; did you mean {prefix}{close[0]}?"
    return f"there is no such field; known here: {', '.join(sorted(known))}"


def _typed(name: str, value: object, expected: type) -> object:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    plain = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    _check(name, value, plain, f"give {wanted[expected]}")
    return value


@dataclass(frozen=True)
class Environment:
    """The only place where environment variables are read."""

    ray_address: str | None
    ray_address_file: Path
    cores: int

    @staticmethod
    def read() -> Environment:
        """Reads what this process was started with."""
        variables = os.environ
        folder = Path(variables.get("RAY_TMPDIR") or "/tmp") / "ray"
        return Environment(
            ray_address=variables.get("RAY_ADDRESS") or None,
            ray_address_file=folder / "ray_current_cluster",
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        )
