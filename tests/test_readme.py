"""The README's commands, run as a reader would paste them.

The convention: every command in a block fenced as ```bash is run here, in order; what is only to be read (installing
Python, cloning) is fenced as ```sh, and output as ```text. A block fenced as ```python is run too, in the environment
that `make` made.

    make serve ...       started for real, on a free port; what follows is asked of it, until the next `make serve`
    make <other> ...     checked with `make -n`: the target exists and would run (the tests can't run themselves)
    curl ...             must succeed and answer with sensible JSON, or a complete event stream, or a page
    cygnet ...           run to its end; `bench` and `chat` are pointed at the server, `chat` is told a sentence

A command of any other kind fails the test: nothing in the README goes unchecked.
"""

import json
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8000")
READY = re.compile(r"is ready on (http://\S+)")
START_TIMEOUT_S = 600
"""Covers an install: `make serve` is run as on a fresh machine, where it may have to fetch what it needs."""
COMMAND_TIMEOUT_S = 300


@dataclass(frozen=True)
class Command:
    """One command line (continuation lines joined) or one Python block, and where it stands."""

    kind: str
    text: str
    line: int


def commands(markdown: str) -> list[Command]:
    """All commands in the fenced blocks that are run."""
    found: list[Command] = []
    fence, block, start = "", [], 0
    for number, line in enumerate(markdown.splitlines(), 1):
        mark = re.match(r"^(```+)(\S*)", line)
        if mark and not fence:
            fence, block, start = mark[2] or "none", [], number + 1
        elif mark and not mark[2]:
            if fence == "python":
                found.append(Command("python", "\n".join(block), start))
            elif fence == "bash":
                found += _shell_lines(block, start)
            fence = ""
        elif fence:
            block.append(line)
    return found


def _shell_lines(block: list[str], start: int) -> Iterator[Command]:
    """Joins continued lines and open quotes, drops comments."""
    pending, first = "", start
    for number, line in enumerate(block, start):
        if not pending:
            first = number
        pending += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is still open
            continue
        if words:
            yield Command("shell", pending.strip(), first)
        pending = ""
    assert not pending.strip(), f"README.md:{first}: unfinished command {pending!r}"


def environment() -> dict[str, str]:
    """This process's, less what an outer `make` would hand to an inner one."""
    hidden = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "CYGNET_API_KEY")
    bin_path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PATH": bin_path, "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`make serve ...` on a free port, from its start to its end by SIGTERM."""

    def __init__(self, command: Command) -> None:
        words = shlex.split(command.text, comments=True)
        self.port = free_port()
        given = next((word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")), "")
        others = [word for word in words if not word.startswith("ARGS=")]
        self.process = subprocess.Popen(
            [*others, f"ARGS={given} --port {self.port}"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_ready(self) -> None:
        while True:
            line = self._lines.get(timeout=START_TIMEOUT_S)
            assert line is not None, f"`make serve` ended before it was ready:\n{''.join(self.output)}"
            if READY.search(line):
                return

    def stop(self) -> None:
        """SIGTERM to `make` must end everything below it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        gone, alive = psutil.wait_procs(below, timeout=60)
        for process in alive:
            process.kill()
        self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert gone, "the server was not running any more"
        assert not alive, f"left behind after SIGTERM: {alive}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "the port is still served"


class Reader:
    """Someone who reads the README from top to bottom and runs what it says."""

    def __init__(self) -> None:
        self.server: Server | None = None

    def run(self, command: Command) -> None:
        words = shlex.split(command.text, comments=True) if command.kind == "shell" else ["python"]
        where = f"README.md:{command.line}: {command.text}"
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[:2] == ["make", "serve"]:
            self.close()
            self.server = Server(command)
            self.server.wait_ready()
        elif words[0] == "make":
            dry = self._bash(f"make -n {shlex.join(words[1:])}", where)
            assert words[1:2] != ["test"] or "-m pytest" in dry, f"{where}: would not run the tests"
        elif words[0] == "curl":
            check_answer(
                self._bash(self._here(command.text).replace("curl", "curl -sS --fail-with-body", 1), where), where
            )
        elif words[0] == "cygnet":
            self._bash(self._cygnet(command.text, words), where, stdin="Once upon a time\n/quit\n")
        elif words[0] == "python":
            self._bash("python -", where, stdin=self._here(command.text))
        else:
            pytest.fail(f"{where}: no way to check `{words[0]}`; fence what is only to be read as ```sh")

    def _cygnet(self, text: str, words: list[str]) -> str:
        """The command, against our server where it would look for one on the usual port."""
        text = self._here(text)
        if words[1:3] == ["bench", "serve"] or words[1:2] == ["chat"]:
            if "--url" not in words and "--model" not in words:
                text += f" --url http://127.0.0.1:{self._port()}"
        else:
            assert words[1:2] != ["serve"], f"{text}: write `make serve`, which can be told a free port"
        return text

    def _port(self) -> int:
        assert self.server is not None, "the README asks a server before it says how to start one"
        return self.server.port

    def _here(self, text: str) -> str:
        return ADDRESS.sub(lambda _: f"127.0.0.1:{self._port()}", text)

    def _bash(self, text: str, where: str, stdin: str = "") -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=ROOT,
            env=environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{where}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def close(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.stop()


def check_answer(body: str, where: str) -> None:
    """An answer is a JSON object without an error (with text, where it has choices), a complete stream, or a page."""
    assert body.strip(), f"{where}: an empty answer"
    if body.startswith("data:"):
        events = [line[5:].strip() for line in body.splitlines() if line.startswith("data:")]
        assert events[-1] == "[DONE]", f"{where}: the stream is incomplete"
        assert all("error" not in json.loads(event) for event in events[:-1]), f"{where}: {body}"
        return
    try:
        answer = json.loads(body)
    except json.JSONDecodeError:
        assert "# TYPE" in body or "<html" in body, f"{where}: neither JSON nor metrics nor a page: {body[:200]}"
        return
    assert isinstance(answer, dict), f"{where}: {body[:200]}"
    assert "error" not in answer, f"{where}: {body[:500]}"
    for choice in answer.get("choices", ()):
        text = choice.get("text") or choice.get("message", {}).get("content")
        assert text, f"{where}: a choice without text: {body[:500]}"


@pytest.mark.slow
def test_the_commands_in_the_readme_work() -> None:
    found = commands(README.read_text())
    texts = [command.text for command in found]
    assert any(text.startswith("make serve") for text in texts), "the README does not say how to start"
    assert any(text.startswith("make test") for text in texts), "the README does not say how to test"
    assert any(text.startswith("curl") for text in texts), "the README asks nothing of the server"
    reader = Reader()
    try:
        for command in found:
            reader.run(command)
    finally:
        reader.close()


def test_commands_are_found() -> None:
    markdown = """
```sh
sudo apt-get install python3
```
```bash
make serve   # comment
# only a comment
curl http://localhost:8000/v1/completions \\
  -d '{"prompt": "a",
       "max_tokens": 3}'
.venv/bin/cygnet doctor
```
```text
curl not this
```
```python
print(1)
if True:
    print(2)
```
"""
    found = commands(markdown)
    assert [(command.kind, command.line) for command in found] == [
        ("shell", 6),
        ("shell", 8),
        ("shell", 11),
        ("python", 17),
    ]
    assert shlex.split(found[1].text)[-1] == '{"prompt": "a",\n       "max_tokens": 3}'
    assert found[3].text == "print(1)\nif True:\n    print(2)"
    with pytest.raises(AssertionError, match="unfinished"):
        commands("```bash\ncurl 'x\n```\n")


def test_a_command_that_can_not_be_checked_fails() -> None:
    for text, reason in (("wget x", "no way to check"), ("cygnet serve", "make serve"), ("make nonsense", "exit 2")):
        with pytest.raises((AssertionError, pytest.fail.Exception), match=reason):
            Reader().run(Command("shell", text, 1))
    with pytest.raises(AssertionError, match="before it says how to start"):
        Reader().run(Command("shell", "curl http://127.0.0.1:8000/health", 1))
    Reader().run(Command("shell", "make test", 1))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "oops",
        "[1]",
        '{"error": {"message": "no"}}',
        '{"choices": [{"text": ""}]}',
        'data: {"choices": []}\n\n',
        'data: {"error": {}}\n\ndata: [DONE]\n',
    ],
)
def test_a_bad_answer_is_caught(body: str) -> None:
    with pytest.raises(AssertionError):
        check_answer(body, "here")


def test_a_good_answer_passes() -> None:
    check_answer('{"choices": [{"text": " Paris"}]}', "here")
    check_answer('{"status": "ok"}', "here")
    check_answer('data: {"choices": []}\n\ndata: [DONE]\n\n', "here")
    check_answer("# HELP x\n# TYPE x counter\nx 1\n", "here")
