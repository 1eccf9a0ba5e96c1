"""Fixtures of the CLI tests: the command line in a process of its own or in this one, and a fake server."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cli.fake_openai import FakeOpenAI

Cygnet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cygnet() -> Cygnet:
    """`cygnet("serve", "--help")` in a process of its own, on a plain 80-column terminal, with a clean environment."""

    def run(*args: str, stdin: str = "", env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CYGNET_")}
        return subprocess.run(
            [sys.executable, "-m", "cygnet.cli.main", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env={**clean, "COLUMNS": "80", "NO_COLOR": "1", **(env or {})},
        )

    return run


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The same in this process, which is faster: typer's runner, whose result has `output`, `stdout`, `exit_code`."""
    from typer.testing import CliRunner

    from cygnet.cli.main import app

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CYGNET_API_KEY", raising=False)

    def run(*args: str, stdin: str = "") -> Any:
        return CliRunner().invoke(app, list(args), input=stdin, prog_name="cygnet")

    return run


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    """An OpenAI-compatible server to talk to."""
    with FakeOpenAI() as server:
        yield server
