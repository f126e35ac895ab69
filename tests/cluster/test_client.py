"""The Python client where processes fork, and its pure parts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.completion import Options, join, to_chunk, to_request
from outrider.protos import outrider_pb2 as pb

FORKING = """
import multiprocessing, sys
from outrider.cluster.client import Client

def ask(client, answers):
    answers.put(client.generate([5, 9], max_tokens=3, ignore_eos=True, timeout_s=5).text)

if __name__ == "__main__":
    client = Client(sys.argv[1])
    if sys.argv[3] == "used":
        client.generate([5, 9], max_tokens=1, timeout_s=5)
    context = multiprocessing.get_context(sys.argv[2])
    answers = context.Queue()
    # A spawned process makes a client of its own; a forked one inherits this one.
    given = Client(sys.argv[1]) if sys.argv[2] == "spawn" else client
    child = context.Process(target=ask, args=(given, answers))
    child.start()
    print(answers.get(timeout=20))
    child.join(5)
    client.generate([5, 9], max_tokens=1, timeout_s=5)
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("state", ["fresh", "used"])
async def test_a_client_survives_a_new_process(
    door: Any, tmp_path: Path, method: str, state: str
) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        door.address,
        method,
        state,
        env={"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 30.0)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, errors.decode()
    assert len(output.split()) == 3


def test_absent_options_stay_absent_on_the_wire() -> None:
    request = to_request("hi", Options(), "r")
    for name in ("max_tokens", "num_speculative_tokens", "seed"):
        assert not request.HasField(name)
    assert to_request("hi", Options(num_speculative_tokens=0), "r").HasField(
        "num_speculative_tokens"
    )


def test_prompts_are_told_apart() -> None:
    assert to_request("a", Options(), "r").WhichOneof("prompt") == "text"
    assert to_request([1, 2], Options(), "r").WhichOneof("prompt") == "tokens"
    chat = to_request([{"role": "user", "content": "a"}], Options(), "r")
    assert chat.WhichOneof("prompt") == "chat"
    with pytest.raises(TypeError, match="mixture"):
        mixed: Any = [{"role": "user", "content": "a"}, 3]
        to_request(mixed, Options(), "r")


def test_a_stream_that_broke_off_is_no_completion() -> None:
    with pytest.raises(ValueError, match="ended before"):
        join([to_chunk(pb.GenerateResponse(request_id="r", text="a"))])
