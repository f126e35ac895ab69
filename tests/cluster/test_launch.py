"""Joining or starting Ray: what an address file is worth, and how long it may cost."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.cluster import launch
from outrider.cluster.config import ConfigError, Environment, load_config

ONE_LINE = """
import sys
from outrider.cluster.cli import main
sys.argv = ["outrider", *sys.argv[1:]]
main()
"""


CONFIG = load_config(None, {"target.path": "m"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(folder: Path, content: str | None, address: str | None = None) -> Environment:
    file = folder / "ray_current_cluster"
    if content is not None:
        file.write_text(content)
    return Environment(ray_address=address, ray_address_file=file, cores=2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was joined or started, without doing it."""
    calls: list[str] = []

    def join(address: str) -> str:
        calls.append(address)
        return ""

    monkeypatch.setattr(launch, "_join", join)
    monkeypatch.setattr(launch, "_start_local", lambda *given: join("local"))
    return calls


def test_no_address_starts_a_local_ray(tmp_path: Path, started: list[str]) -> None:
    launch.connect(None, CONFIG, environment(tmp_path, None))
    assert started == ["local"]


def test_a_dead_address_file_hangs_nothing(tmp_path: Path, started: list[str]) -> None:
    began = time.monotonic()
    launch.connect(None, CONFIG, environment(tmp_path, f"127.0.0.1:{free_port()}"))
    assert started == ["local"]
    assert time.monotonic() - began < 6.0


def test_something_that_accepts_but_is_no_ray_costs_five_seconds(
    tmp_path: Path, started: list[str]
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        launch.connect(None, CONFIG, environment(tmp_path, address))
        assert time.monotonic() - began < 7.0
        assert started == ["local"]
        with pytest.raises(ConfigError, match="no Ray cluster answers"):
            launch.connect(address, CONFIG, environment(tmp_path, None))


def test_a_file_with_rubbish_is_ignored(tmp_path: Path, started: list[str]) -> None:
    launch.connect(None, CONFIG, environment(tmp_path, "not an address"))
    assert started == ["local"]


def test_a_cluster_that_answers_is_joined(
    tmp_path: Path, started: list[str], local_ray: None
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    launch.connect(None, CONFIG, environment(tmp_path, address))
    launch.connect(None, CONFIG, environment(tmp_path, None, address))
    launch.connect(address, CONFIG, environment(tmp_path, None))
    launch.connect("local", CONFIG, environment(tmp_path, address))
    assert started == [address, address, address, "local"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], ["target.path", "name a model"]),
        (
            ["serve", "--target", "/nowhere/m", "--draft-placement", "none", "--address", "local"],
            ["path", "/nowhere/m"],
        ),
        (["serve", "--draft-placement", "far"], ["draft.placement", "far", "remote"]),
        (["serve", "--set", "draft.tale=1"], ["draft.tale", "did you mean draft.tail"]),
        (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["status", "--address", "127.0.0.1:1"], ["UNAVAILABLE"]),
    ],
)
def test_start_up_errors_are_one_line(arguments: list[str], words: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ONE_LINE, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.strip().splitlines()
    for word in words:
        assert word in line
