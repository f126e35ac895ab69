"""Configuration: every refusal names the field, the value and the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, load_config, parse_override


def test_reading_it_imports_no_torch() -> None:
    code = "import sys, outrider.cluster.config; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text('service = "chat"\n[target]\npath = "m"\n[draft]\nnum_speculative_tokens = 3\n')
    config = load_config(path, {"draft.num_speculative_tokens": 5, "gateway.port": 0})
    assert config.service == "chat"
    assert config.target.path == "m"
    assert config.draft.num_speculative_tokens == 5
    assert config.gateway.port == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[draft]\nnum_speculative_token = 3\n", ["draft.num_speculative_token", "tokens?"]),
        ("[drafter]\ntail = 0.1\n", ["drafter", "did you mean draft"]),
        ("zebra = 1\n", ["zebra", "known here", "service"]),
        ('[draft]\nnum_speculative_tokens = "2"\n', ["num_speculative_tokens", "whole number"]),
        ("[draft]\nnum_speculative_tokens = -1\n", ["num_speculative_tokens", "-1", "0 to 16"]),
        ("[draft]\ntail = nan\n", ["draft.tail", "nan", "[0, 1)"]),
        ("[draft]\ndeadline_ms = 0\n", ["deadline_ms", "above 0"]),
        ('[draft]\nplacement = "far"\n', ["placement", "far", "remote, colocated, none"]),
        ("[gateway]\nport = 70000\n", ["gateway.port", "70000", "65535"]),
        ("[gateway]\nadmission_limit = true\n", ["admission_limit", "whole number"]),
        ("[counts]\ndrafters = 0\n", ["counts.drafters", "at least 1"]),
        ("[control]\nstart_timeout_s = inf\n", ["start_timeout_s", "finite"]),
        ('service = "My Service"\n', ["service", "My Service", "lower-case"]),
        ("target = 3\n", ["target", "[target]"]),
        ("[target\n", ["config file", "TOML"]),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "service.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(path, {})
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml", {})


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.deadline_ms"):
        load_config(None, {"draft.deadlines_ms": 5})


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=3", 3), ("a.b=0.5", 0.5), ("a.b=true", True), ("a.b=plain words", "plain words")],
)
def test_overrides_are_read_as_toml(text: str, value: object) -> None:
    assert parse_override(text) == ("a.b", value)


def test_no_draft_tokens_means_no_drafter() -> None:
    assert load_config(None, {"draft.num_speculative_tokens": 0}).placement == "none"
