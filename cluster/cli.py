"""The command line: `outrider serve | generate | chat | scale | status | demo | train-head`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from outrider.cluster.client import DEFAULT_ADDRESS, CallFailed, Client
from outrider.cluster.completion import Completion, Options, join
from outrider.cluster.config import (
    ConfigError,
    Environment,
    ServiceConfig,
    StartError,
    load_config,
    parse_override,
)
from outrider.cluster.terminal import (
    legend,
    progress_line,
    statistics_line,
    status_table,
    write_coloured,
)
from outrider.drafter.head_config import HeadError
from outrider.protos.sampling import InvalidField

app = typer.Typer(
    help="Lossless speculative decoding on Ray, with the drafter on other GPUs than the target.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()

Address = Annotated[str, typer.Option(help="Where the gateway listens.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object instead of text.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; see cluster/config.py.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set one field, as in draft.num_speculative_tokens=3."),
]
MaxTokens = Annotated[int | None, typer.Option(help="At most so many new tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option(help="Keep so many tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="Repeatable randomness.")]
DraftTokens = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a round; 0 is plain."),
]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour each token by where it came from.")
]


@app.command()
def serve(
    target: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    head: Annotated[str | None, typer.Option(help="Folder of an EAGLE-3 head.")] = None,
    draft_placement: Annotated[str | None, typer.Option(help="remote, colocated or none.")] = None,
    num_speculative_tokens: DraftTokens = None,
    drafters: Annotated[int | None, typer.Option(help="Drafter actors.")] = None,
    verifiers: Annotated[int | None, typer.Option(help="Verifier actors.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    service: Annotated[str | None, typer.Option(help="Name of the service.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join (host:port), or `local` to start one here."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Starts a service and serves until it is interrupted."""
    from outrider.cluster.launch import connect, placement_note, start_service

    named = {
        "target.path": target,
        "draft.head": head,
        "draft.placement": draft_placement,
        "draft.num_speculative_tokens": num_speculative_tokens,
        "counts.drafters": drafters,
        "counts.verifiers": verifiers,
        "gateway.host": host,
        "gateway.port": port,
        "service": service,
    }
    settings = _settings(config, overrides, named)
    console.print(connect(address, settings, Environment.read()))
    console.print(placement_note(settings))
    interrupted = threading.Event()
    with console.status("starting") as line:
        running = start_service(settings, lambda status: line.update(progress_line(status)))
    console.print(f"serving {settings.target.path} at {running.address}")

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    interrupted.wait()
    console.print("draining")
    running.stop(settings.control.drain_timeout_s)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    address: Address = DEFAULT_ADDRESS,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    num_speculative_tokens: DraftTokens = None,
    show_drafts: ShowDrafts = False,
    as_json: Json = False,
) -> None:
    """Goes on from a text."""
    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
    )
    with Client(address) as client:
        _answer(client, prompt, options, show_drafts, as_json)


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="One message; without it a conversation begins.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    num_speculative_tokens: DraftTokens = None,
    show_drafts: ShowDrafts = False,
    as_json: Json = False,
) -> None:
    """Talks to the model through its chat template."""
    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
    )
    messages = [{"role": "system", "content": system}] if system else []
    with Client(address) as client:
        if message is not None:
            messages.append({"role": "user", "content": message})
            _answer(client, messages, options, show_drafts, as_json)
            return
        console.print("Ctrl-D ends the conversation.", style="dim")
        while True:
            try:
                line = console.input("[bold]> [/bold]")
            except EOFError:
                return
            messages.append({"role": "user", "content": line})
            answer = _answer(client, messages, options, show_drafts, as_json)
            messages.append({"role": "assistant", "content": answer.text})


@app.command()
def scale(
    drafters: Annotated[int | None, typer.Option(help="Drafter actors.")] = None,
    verifiers: Annotated[int | None, typer.Option(help="Verifier actors.")] = None,
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Changes how many drafters and verifiers there are."""
    with Client(address) as client:
        reached = client.scale(drafters=drafters, verifiers=verifiers)
    if as_json:
        _write_json({"drafters": reached[0], "verifiers": reached[1]})
    else:
        console.print(f"{reached[0]} drafters, {reached[1]} verifiers")


@app.command()
def status(address: Address = DEFAULT_ADDRESS, as_json: Json = False) -> None:
    """Shows the actors of a service and what they run on."""
    with Client(address) as client:
        state = client.status()
    if as_json:
        _write_json(dataclasses.asdict(state))
    else:
        console.print(status_table(state))


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary to this file.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Model; SmolLM2-135M-Instruct if left out.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Folder of an EAGLE-3 head.")] = None,
    draft_placement: Annotated[str | None, typer.Option(help="remote or colocated.")] = None,
    num_speculative_tokens: DraftTokens = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Starts everything on this machine, chats, and measures what speculation brings."""
    from outrider.cluster.demo import packaged_target, run_demo

    named = {
        "target.path": target or packaged_target(),
        "draft.head": head,
        "draft.placement": draft_placement,
        "draft.num_speculative_tokens": num_speculative_tokens,
        "gateway.port": 0,
    }
    summary = run_demo(_settings(config, overrides, named), console)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}")


@app.command()
def train_head(
    target: Annotated[str, typer.Option(help="Model folder, .gguf file or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the new head; run again, it goes on.")],
    data: Annotated[
        Path | None, typer.Option(help="JSONL of chats that the target answered.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts for the target to answer.")
    ] = None,
    count: Annotated[int, typer.Option(help="Chats to generate where no data are given.")] = 4096,
    max_length: Annotated[int, typer.Option(help="Tokens of a chat at most.")] = 640,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 2000,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens in a step.")] = 2048,
    unroll: Annotated[int, typer.Option(help="Steps of the training-time test.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    draft_vocab_size: Annotated[int, typer.Option(help="Words that the head drafts.")] = 8192,
    seed: Annotated[int, typer.Option(help="Order of batches and random starts.")] = 0,
) -> None:
    """Trains an EAGLE-3 head for a target on this machine."""
    from outrider.cluster.loading import load_training_target
    from outrider.drafter.training.command import HeadShape, TrainingData
    from outrider.drafter.training.command import train_head as train
    from outrider.drafter.training.corpus import CorpusError
    from outrider.drafter.training.trainer import TrainingPlan

    model, tokenizer = load_training_target(target)
    plan = TrainingPlan(
        steps=steps,
        tokens_per_step=tokens_per_step,
        unroll=unroll,
        learning_rate=learning_rate,
        seed=seed,
    )
    source = TrainingData(data=data, prompts=prompts, count=count, max_length=max_length)
    try:
        result = train(model, tokenizer, source, HeadShape(draft_vocab_size), plan, out)
    except CorpusError as error:
        raise StartError(str(error)) from error
    for name, lengths in (
        ("temperature 0", result.acceptance_length_t0),
        ("temperature 1", result.acceptance_length_t1),
    ):
        shown = ", ".join(f"{value:.2f} (K={k})" for k, value in enumerate(lengths, start=1))
        console.print(f"expected acceptance length at {name}: {shown}")


def main() -> None:
    """The console script: failures are one line on stderr and a status other than 0."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except (ConfigError, StartError, CallFailed, InvalidField, HeadError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _settings(
    path: Path | None, overrides: list[str] | None, named: dict[str, Any]
) -> ServiceConfig:
    changes = {name: value for name, value in named.items() if value is not None}
    changes.update(parse_override(text) for text in overrides or [])
    return load_config(path, changes)


def _answer(
    client: Client, prompt: Any, options: Options, show_drafts: bool, as_json: bool
) -> Completion:
    """Streams one answer to the terminal, or writes it whole as JSON."""
    wanted = dataclasses.replace(options, want_token_texts=show_drafts)
    chunks = []
    if show_drafts and not as_json:
        console.print(legend(options.num_speculative_tokens or 4))
    for chunk in client.stream(prompt, wanted):
        chunks.append(chunk)
        if as_json:
            continue
        if show_drafts:
            write_coloured(console, chunk)
        else:
            console.print(chunk.text, end="", soft_wrap=True, markup=False, highlight=False)
    answer = join(chunks)
    if as_json:
        _write_json(dataclasses.asdict(answer))
    else:
        console.print()
        if show_drafts:
            console.print(statistics_line(answer), style="dim")
    return answer


def _write_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + os.linesep)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"outrider: {message}\n")
    sys.exit(1)


if __name__ == "__main__":
    main()
