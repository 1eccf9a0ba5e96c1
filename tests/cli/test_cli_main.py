"""The command as a whole: fast start, help that fits a screen, nearest matches, one red line per error."""

import logging
import subprocess
import sys
from typing import Any

import pytest

from cygnet.base.errors import InvariantError
from cygnet.version import __version__

HEAVY = ("torch", "numpy", "httpx", "fastapi", "uvicorn", "transformers", "zmq", "rich", "psutil", "asyncio")
VERBS = (
    ["serve"],
    ["router"],
    ["chat"],
    ["cache", "inspect"],
    ["cache", "flush"],
    ["plan"],
    ["simulate"],
    ["up"],
    ["bench", "calibrate"],
    ["bench", "serve"],
    ["config", "show"],
    ["doctor"],
    ["version"],
    [],
)
GCACHE_VERBS = (
    ["gcache"],
    *(["gcache", verb] for verb in ("serve", "stat", "top", "get", "put", "bench", "members", "drain")),
)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['cygnet', '--help']\n"
        "from cygnet.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Usage: " in run.stdout
    assert run.stdout.rstrip().endswith("LOADED []")


@pytest.mark.parametrize("verb", [*VERBS, *GCACHE_VERBS], ids="-".join)
def test_help_fits_a_screen(invoke: Any, verb: list[str]) -> None:
    result = invoke(*verb, "--help")
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.rstrip().endswith("...")], "a summary is cut off"


def test_version(cygnet: Any) -> None:
    for args in (["--version"], ["version"]):
        run = cygnet(*args)
        assert (run.returncode, run.stdout) == (0, f"cygnet {__version__}\n")


@pytest.mark.parametrize(
    ("args", "nearest"),
    [
        (["srve"], "'serve'"),
        (["docter"], "'doctor'"),
        (["bench", "srve"], "'serve'"),
        (["config", "shw"], "'show'"),
        (["cache", "inspct"], "'inspect'"),
        (["serve", "--prt", "1"], "--port"),
        (["serve", "--kv-cache-memry", "1GiB"], "--kv-cache-memory"),
        (["bench", "serve", "--concurency", "1"], "--concurrency"),
    ],
)
def test_a_misspelt_word_names_the_nearest(invoke: Any, args: list[str], nearest: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert nearest in result.output


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["config", "show", "--set", "kv.blocksize=3"], "did you mean 'kv.block_size'"),
        (["config", "show", "--config", "/nowhere.toml"], "can't read config file /nowhere.toml"),
        (["serve", "--kv-cache-memory", "lots"], "2GiB"),
        (["serve", "--log-level", "loud"], "debug, info, warning, error"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "cygnet serve"),
        (["chat", "--url", "http://127.0.0.1:9"], "cygnet serve"),
        (["cache", "inspect", "--url", "http://127.0.0.1:9"], "cygnet serve"),
        (["cache", "flush", "--url", "http://127.0.0.1:9"], "cygnet serve"),
    ],
)
def test_an_error_is_one_line_with_the_remedy(cygnet: Any, args: list[str], line: str) -> None:
    run = cygnet(*args)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert line in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


def test_wrong_usage_exits_with_2(cygnet: Any) -> None:
    run = cygnet("serve", "--port", "many")
    assert run.returncode == 2
    assert "--port" in run.stderr


def test_debug_shows_the_traceback(cygnet: Any) -> None:
    args = ["serve", "--set", "kv.blocksize=3"]
    for level, has_trace in (("info", False), ("debug", True)):
        run = cygnet(*args, "--log-level", level)
        assert run.returncode == 1
        assert "did you mean 'kv.block_size'" in run.stderr
        assert ("Traceback" in run.stderr) == has_trace
    assert "Traceback" in cygnet(*args, env={"CYGNET_LOG_LEVEL": "debug"}).stderr


def test_our_own_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from cygnet.cli.main import main

    async def fail(config: object, level: str) -> None:
        raise InvariantError("two owners")

    logger = logging.getLogger("cygnet")
    monkeypatch.setattr(logger, "level", logger.level)  # put back afterwards
    monkeypatch.setattr("cygnet.cli.server.run_server", fail)
    monkeypatch.setattr(sys, "argv", ["cygnet", "serve"])
    with pytest.raises(InvariantError):
        main()
