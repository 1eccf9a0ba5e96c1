"""A server of our own for one conversation: a child process on a free loopback port."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from cygnet.base.errors import CygnetError
from cygnet.cli.banner import READY_WORDS


class ChildServerError(CygnetError):
    """The child ended before it was ready; it has said why on stderr."""


class ChildServer:
    """`cygnet serve MODEL` for as long as the `with` block lasts.

    The child has a session of its own, so that Ctrl-C in the conversation does not reach it. Its progress and errors go
    to our stderr; its stdout is read for the address, and then only drained.
    """

    def __init__(self, model: str, sets: Sequence[str], api_key: str = "") -> None:
        options = [part for item in sets for part in ("--set", item)]
        self._command = [sys.executable, "-m", "cygnet.cli.main", "serve", model, "--port", "0", *options]
        self._command += ["--set", "api.log_requests=false", "--log-level", "warning"]
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"CYGNET_API_KEY": api_key} if api_key else {})}
        self._drainer: threading.Thread | None = None
        self.url = ""

    def __enter__(self) -> "ChildServer":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            self.url = self._wait_ready(self._process.stdout)
        except BaseException:
            self._stop()
            raise
        self._drainer = threading.Thread(target=self._drain, args=(self._process.stdout,), daemon=True)
        self._drainer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _wait_ready(self, output: IO[str]) -> str:
        for line in output:
            if READY_WORDS in line:
                return line.split()[-1]
        raise ChildServerError(f"the server for the conversation did not start (exit code {self._process.wait()})")

    @staticmethod
    def _drain(output: IO[str]) -> None:
        for _line in output:
            pass

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._drainer is not None:
            self._drainer.join(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()
