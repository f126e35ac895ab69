"""The command line against a service that it started itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import greedy

COMMAND = [sys.executable, "-m", "outrider.cluster.cli"]
SMALL = {
    "target.dtype": "float32",
    "target.kv_bytes": 8 * 2**20,
    "draft.deadline_ms": 5000.0,
    "resources.verifier_threads": 1,
}


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`outrider serve` in a process of its own; the address, and the process."""
    settings = [part for item in SMALL.items() for part in ("--set", "{}={}".format(*item))]
    paths = ["--target", str(models / "target"), "--head", str(models / "head")]
    process = subprocess.Popen(
        [*COMMAND, "serve", *paths, "--port", "0", "--address", "local", *settings],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    address = None
    for line in process.stdout:
        found = re.search(r"serving .* at (\S+)", line)
        if found:
            address = found[1]
            break
    assert address is not None, process.wait(10)
    yield address, process
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def run(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_against_a_served_model(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    address, process = served
    where = ("--address", address)

    answer: dict[str, Any] = json.loads(
        run("generate", "w5 w9 w17", *where, "--max-tokens", "12", "--temperature", "0", "--json")
    )
    expected = list(greedy((5, 9, 17), 12))
    assert answer["token_ids"] == expected[: len(answer["token_ids"])]
    assert answer["finish_reason"] in ("length", "stop")

    shown = run("generate", "w5 w9 w17", *where, "--max-tokens", "12", "--show-drafts")
    assert "recovered" in shown and "rounds" in shown

    talk = json.loads(run("chat", "w5", *where, "--max-tokens", "4", "--json"))
    assert talk["usage"]["completion_tokens"] <= 4

    state = json.loads(run("status", *where, "--json"))
    assert state["ready"] and [role["desired"] for role in state["roles"]] == [1, 1]
    assert "drafter" in run("status", *where)

    reached = json.loads(run("scale", "--drafters", "2", *where, "--json"))
    assert reached == {"drafters": 2, "verifiers": 1}

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
