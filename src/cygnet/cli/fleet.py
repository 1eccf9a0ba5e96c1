"""Processes of a local fleet: started, watched, started again when they die, and stopped in order; one log for all."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from cygnet.base.errors import CygnetError

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
GOOD_RUN_S = 60.0
"""A process that was up for so long has recovered: its next death is the first again."""
PROBE_S = 0.2
MAX_LINE = 8192
"""Longer lines are broken in the log."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In a new process: be told to end when the parent is gone, also when that was killed."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


Probe = Callable[[], Awaitable[bool]]


class FleetError(CygnetError):
    """A process of the fleet can't run."""


def restart_delay(deaths: int) -> float:
    """Seconds to wait after so many deaths in a row before starting again."""
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** max(0, deaths - 1))


@dataclass(frozen=True)
class Part:
    """One process to run. Parts of a lower `stage` are ready before higher ones start, and stopped after them."""

    name: str
    command: Sequence[str]
    probe: Probe
    """Whether it serves."""
    stage: int
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: float = 30.0
    """What it may take to end when it is told to."""


def cygnet_command(*args: str) -> list[str]:
    """The command line of a `cygnet` verb, with this interpreter."""
    return [sys.executable, "-m", "cygnet.cli.main", *args]


class Child:
    """One part's process, over all its lives."""

    def __init__(self, part: Part, write: Callable[[str, str], None]) -> None:
        self.part = part
        self.state = "waiting"
        """waiting, starting, ready, stopping, ended."""
        self.pid: int | None = None
        self.restarts = 0
        self.since = time.monotonic()
        """When `state` began."""
        self.last_line = ""
        self.was_ready = asyncio.Event()
        """Set once it has served for the first time."""
        self._write = write
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._killed = False

    def _become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    async def run(self) -> None:
        """Keep it running until `stop`. Raises `FleetError` when it ends before it has ever served."""
        deaths = 0
        while not self._stopping:
            began = time.monotonic()
            status = await self._live()
            if self._stopping:
                break
            if not self.was_ready.is_set():
                raise FleetError(f"{self.part.name} ended with status {status} before it was ready: {self.last_line}")
            deaths = 1 if time.monotonic() - began >= GOOD_RUN_S else deaths + 1
            delay_s = restart_delay(deaths)
            self._become("waiting")
            self._write("up", f"{self.part.name} ended with status {status}; it starts again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            self.restarts += 1
        self._become("ended")

    async def _live(self) -> int:
        """One life; its exit status."""
        self._become("starting")
        process = self._process = await asyncio.create_subprocess_exec(
            *self.part.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us: we stop parts in order
            preexec_fn=_end_with_parent if _LIBC is not None else None,
            env={**os.environ, **self.part.environment},
        )
        self.pid = process.pid
        assert process.stdout is not None
        tasks = [asyncio.create_task(self._log(process.stdout)), asyncio.create_task(self._watch())]
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            with suppress(TimeoutError):  # its last words; a grandchild may hold the pipe open
                await asyncio.wait_for(asyncio.shield(tasks[0]), 1.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.pid = self._process = None

    async def _log(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(line)
        if rest:
            self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.last_line = text[:MAX_LINE]
            self._write(self.part.name, text)

    async def _watch(self) -> None:
        """Notice when it serves, and when it no longer does."""
        while True:
            serves = await self.part.probe()
            if serves and self.state == "starting":
                self._become("ready")
                self.was_ready.set()
            elif not serves and self.state == "ready":
                self._become("starting")
            await asyncio.sleep(PROBE_S if self.state == "starting" else 1.0)

    async def stop(self) -> None:
        """Tell it to end, wait, and kill it when it takes longer than it may."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        self._become("stopping")
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if self._killed else signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.part.stop_s)
        except TimeoutError:
            self._write("up", f"{self.part.name} did not end within {self.part.stop_s:g} s; it is killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


async def _all_ready(children: Sequence[Child]) -> None:
    for child in children:
        await child.was_ready.wait()


class Fleet:
    """All parts. `run` returns when they have been stopped; `stop` asks for that, a second time at once."""

    def __init__(self, parts: Sequence[Part], log: TextIO) -> None:
        self._log = log
        self._stopped = asyncio.Event()
        self._width = max((len(part.name) for part in parts), default=0)
        self.children = [Child(part, self.write) for part in parts]

    def write(self, name: str, line: str) -> None:
        """One line of the log."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {name:<{self._width}} | {line}\n")
        self._log.flush()

    def stop(self) -> None:
        """End all parts, the last stage first; asked a second time, kill them."""
        if self._stopped.is_set():
            for child in self.children:
                child.kill()
        self._stopped.set()

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Start stage after stage, keep all running until `stop`, stop them.

        Raises `FleetError` when a part ends before it has ever served; all are stopped then too.
        """
        tasks: dict[asyncio.Task[None], Child] = {}
        stopped: asyncio.Task[Any] = asyncio.create_task(self._stopped.wait())
        try:
            for stage in sorted({child.part.stage for child in self.children}):
                begun = [child for child in self.children if child.part.stage == stage]
                for child in begun:
                    tasks[asyncio.create_task(child.run(), name=child.part.name)] = child
                ready: asyncio.Task[Any] = asyncio.create_task(_all_ready(begun))
                try:
                    await asyncio.wait([stopped, ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ready.cancel()
                self._raise_failure(tasks)
                if self._stopped.is_set():
                    return
            on_ready()
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure(tasks)
        finally:
            stopped.cancel()
            await self._stop_all()
            await asyncio.gather(*self._waiting(tasks), return_exceptions=True)

    @staticmethod
    def _raise_failure(tasks: Mapping["asyncio.Task[None]", Child]) -> None:
        for task in tasks:
            if task.done():
                task.result()

    async def _stop_all(self) -> None:
        for stage in sorted({child.part.stage for child in self.children}, reverse=True):
            await asyncio.gather(*(child.stop() for child in self.children if child.part.stage == stage))

    @staticmethod
    def _waiting(tasks: Mapping["asyncio.Task[None]", Child]) -> list["asyncio.Task[None]"]:
        """Tasks, of which those that wait to start their part again are told not to."""
        for task, child in tasks.items():
            if child.state == "waiting":
                task.cancel()
        return list(tasks)
