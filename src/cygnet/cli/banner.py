"""What `cygnet serve` prints: its stages while it loads, and, once ready, where it is and what to try."""

import json
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from cygnet.base.config import Config

READY_WORDS = "is ready on"
"""In the line that gives the server's address, which is that line's last word. `cygnet chat --model` waits for it."""


class Stages:
    """The stage of a long start: a spinner on a terminal, a line per stage elsewhere."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> "Stages":
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """The start has come to `stage`, and within it to `done` of `total` (0: unknown)."""
        if self._status is not None:
            from rich.markup import escape

            share = f" {100 * done // total} %" if total else ""
            self._status.update(escape(stage + share))
        elif stage != self._last:
            self._console.print(stage, markup=False, soft_wrap=True)
        self._last = stage


def server_url(host: str, port: int) -> str:
    """An address that a client on this machine can use: a wildcard host becomes loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def example_request(url: str, model: str, *, is_chat: bool, with_key: bool) -> str:
    """A curl command to paste. A base model is shown completing a text, which is what it can do."""
    key = ' -H "Authorization: Bearer $CYGNET_API_KEY"' if with_key else ""
    if is_chat:
        path = "chat/completions"
        fields = {"messages": [{"role": "user", "content": "What is a cygnet?"}], "max_tokens": 48}
    else:
        path = "completions"
        fields = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    body = json.dumps({"model": model, **fields}).replace("'", "'\\''")
    return f"curl {url}/v1/{path} \\\n  -H 'Content-Type: application/json'{key} \\\n  -d '{body}'"


def print_banner(
    console: "Console", url: str, model: str, summary: str, note: str, config: "Config", *, is_chat: bool
) -> None:
    """The ready line, then what was loaded and a first request."""
    from rich.text import Text

    def line(label: str, text: str) -> None:
        console.print(Text.assemble((f"  {label:<9}", "dim"), text), soft_wrap=True)

    console.print(Text.assemble((model, "bold"), f" {READY_WORDS} ", (url, "bold green")), soft_wrap=True)
    for index, part in enumerate(summary.splitlines()):
        line("" if index else "engine", part)
    if note:
        line("note", note)
    line("browser", f"{url}/ (chat and cache), {url}/docs (API)")
    if config.api.host not in ("127.0.0.1", "::1", "localhost") and not config.api.api_key:
        line("warning", f"anyone who can reach {config.api.host} can use this server; set CYGNET_API_KEY")
    line("stop", f"Ctrl-C (running requests get {config.api.drain_s:g} s, a second Ctrl-C ends them)")
    command = example_request(url, model, is_chat=is_chat, with_key=bool(config.api.api_key))
    console.print(Text("\n" + command + "\n", style="cyan"), soft_wrap=True)
