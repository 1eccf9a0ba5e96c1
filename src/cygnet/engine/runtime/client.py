"""The engine as seen from the API process: starts the engine process and speaks to it."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.base.config import Config
from cygnet.base.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from cygnet.base.messages import (
    AbortRequests,
    AddRequest,
    CacheChanged,
    CacheFlushed,
    CacheInspected,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineProgress,
    EngineReady,
    EngineStart,
    EngineStats,
    FlushCache,
    InspectCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
    WatchCache,
)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while the engine loads; a total of 0 means unknown."""

_ERRORS = {error.__name__: error for error in (InvalidRequestError, ContextLengthError, QueueFullError)}
"""What an engine may say of a request, by name."""

SPIN_COUNT = "10000"
"""Turns of GNU OpenMP's waiting loop, some tens of microseconds: as long as the gap between two products of a step."""
SOCKET_NAME = "engine.sock"
START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0
"""How long an engine's last message may take to arrive once the engine has ended."""
FAILED_STATUS = 1
"""Exit status of an engine that has said why it ended."""

log = logging.getLogger("cygnet.engine")


class Stream:
    """Outputs of one sequence on their way to its reader, merged while they wait."""

    def __init__(self) -> None:
        self._waiting: RequestOutput | None = None
        self._there = asyncio.Event()
        self._failure: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self._waiting = output if self._waiting is None else merge(self._waiting, output)
        self._there.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._there.set()

    async def get(self) -> RequestOutput:
        """The next output; raises what `fail` was given once all outputs are read."""
        await self._there.wait()
        self._there.clear()
        output, self._waiting = self._waiting, None
        if self._failure is not None:
            self._there.set()
        if output is None:
            assert self._failure is not None
            raise self._failure
        return output


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one sequence as one."""
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return msgspec.structs.replace(second, token_ids=first.token_ids + second.token_ids, logprobs=logprobs or None)


def _environment() -> dict[str, str]:
    """Ours, and that compute threads soon stop spinning for one another, unless the user has said how they wait.

    By default an OpenMP thread spins for milliseconds at the end of its share. Where another process has taken the CPU
    of the thread that is waited for, that time is taken from just that thread: a product of 30 us becomes one of 8 ms.
    """
    waiting = {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() else {"GOMP_SPINCOUNT": SPIN_COUNT}
    return {**os.environ, **waiting}


def _listen() -> tuple[zmq.asyncio.Socket, Path]:
    """A socket bound in a new private folder: only this user can reach it. `ConfigError` when there can't be one."""
    folder = Path(tempfile.mkdtemp(prefix="cygnet-"))
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    try:
        socket.bind(f"ipc://{folder}/{SOCKET_NAME}")
    except zmq.ZMQError as error:
        socket.close()
        shutil.rmtree(folder, ignore_errors=True)
        remedy = "let TMPDIR name a folder with a shorter path, on a local disk"
        raise ConfigError(
            f"can't make the engine's socket in {folder}: {os.strerror(error.errno or 0)}; {remedy}"
        ) from None
    return socket, folder


class EngineProcess:
    """An engine in a process of its own. Implements `EngineClient`; made by `start`, or by `launch` and `load`.

    Invariants: `_streams` holds what is read by somebody, `_unfinished` those of them that the engine still works on,
    as far as it has said; `_asked` holds what is asked and not answered, by ticket; a failure, once set,
    stays, and every stream and question of then and later raises it.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path, limit: int = 0
    ) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._limit = limit
        self._streams: dict[str, Stream] = {}
        self._unfinished: set[str] = set()
        self._ready: EngineReady | None = None
        self._stats = EngineStats()
        self._failure: EngineDeadError | None = None
        self._failed = asyncio.Event()
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineOutput)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._asked: dict[int, asyncio.Future[CacheFlushed | CacheInspected]] = {}
        self._num_asked = 0
        self._listener: Callable[[CacheChanged], None] | None = None

    # ------------------------------------------------------------------- start

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        eos_token_ids: Sequence[int] = (),
        on_progress: Progress = lambda stage, done, total: None,
        log_level: str = "info",
    ) -> "EngineProcess":
        """`launch` and `load`; a start that fails leaves nothing behind."""
        client = await cls.launch()
        try:
            await client.load(config, eos_token_ids=eos_token_ids, on_progress=on_progress, log_level=log_level)
        except BaseException:
            await client.aclose()
            raise
        return client

    @classmethod
    async def launch(cls) -> "EngineProcess":
        """Start a process, which imports what an engine needs: that takes a second, in which others can work.

        It waits for `load`; `aclose` ends it with or without.
        """
        socket, folder = _listen()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cygnet.engine.runtime.process",
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, socket, folder)

    async def load(
        self,
        config: Config,
        *,
        eos_token_ids: Sequence[int] = (),
        on_progress: Progress = lambda stage, done, total: None,
        log_level: str = "info",
    ) -> None:
        """Have the launched process load the model, and wait until it is ready; once per process.

        Raises `ConfigError` with the engine's own words when it can't. `on_progress` is called while it loads.
        """
        self._limit = config.engine.max_requests
        address = f"ipc://{self._folder}/{SOCKET_NAME}"
        message = EngineStart(config=config, address=address, eos_token_ids=list(eos_token_ids), log_level=log_level)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        with contextlib.suppress(ConnectionError):  # it has died already; `_wait_ready` says so
            await self._process.stdin.drain()
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._wait_ready(on_progress)
        self._tasks = [
            asyncio.create_task(self._receive(), name="engine-receive"),
            asyncio.create_task(self._watch(), name="engine-watch"),
        ]

    async def _wait_ready(self, on_progress: Progress) -> None:
        died = asyncio.create_task(self._process.wait())
        try:
            while True:
                match await self._read_unless(died):
                    case EngineReady() as ready:
                        self._ready, self._stats = ready, ready.stats
                        return
                    case EngineProgress(stage, done, total):
                        on_progress(stage, done, total)
                    case EngineFailed(message=message):
                        raise ConfigError(message)
        finally:
            died.cancel()

    async def _read_unless(self, died: "asyncio.Task[int]") -> EngineOutput:
        """The next message; `ConfigError` when the engine has ended and there is none."""
        received = asyncio.create_task(self._read())
        try:
            await asyncio.wait({died, received}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait({received}, timeout=LAST_WORDS_S)
            if not received.done():
                raise ConfigError(f"the engine process ended at start with status {self._process.returncode}")
            return received.result()
        finally:
            received.cancel()

    # ------------------------------------------------------------ EngineClient

    @property
    def ready(self) -> EngineReady:
        assert self._ready is not None
        return self._ready

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        return self._failure is None and not self._closing

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        self._check(request)
        stream = self._streams[request.request_id] = Stream()
        self._unfinished.add(request.request_id)
        self._idle.clear()
        finished = False
        try:
            self._send(request)
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                if output.error is not None:
                    raise _ERRORS.get(output.error_type or "", InvalidRequestError)(
                        output.error, request_id=request.request_id
                    )
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            self._unfinished.discard(request.request_id)
            if not self._streams:
                self._idle.set()
            if not finished and self._failure is None:
                self._send(AbortRequests([request.request_id]))

    def _check(self, request: AddRequest) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", request_id=request.request_id)
        # Not those that only wait for a slow reader: clients that don't read must not keep others out.
        if len(self._unfinished) >= self._limit:
            raise QueueFullError(
                f"{len(self._unfinished)} requests are running or waiting, the limit of this server",
                request_id=request.request_id,
            )

    async def flush_cache(self, *, store: bool = False) -> FlushReport:
        """See `EngineClient.flush_cache`."""
        answer = await self._ask(FlushCache(store, self._new_ticket()))
        assert isinstance(answer, CacheFlushed)
        return answer.dropped

    async def inspect_cache(self, limit: int) -> CacheReport:
        """See `EngineClient.inspect_cache`."""
        answer = await self._ask(InspectCache(limit, self._new_ticket()))
        assert isinstance(answer, CacheInspected)
        return answer.report

    def watch_cache(self, listener: Callable[[CacheChanged], None] | None) -> None:
        """See `EngineClient.watch_cache`."""
        self._listener = listener
        if self._failure is None:
            self._send(WatchCache(listener is not None))

    def _new_ticket(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def _ask(self, question: FlushCache | InspectCache) -> CacheFlushed | CacheInspected:
        """Send a question and wait for its answer, which comes between two steps."""
        if self._failure is not None:
            raise self._failure
        answer: asyncio.Future[CacheFlushed | CacheInspected] = asyncio.get_running_loop().create_future()
        self._asked[question.ticket] = answer
        try:
            self._send(question)
            return await answer
        finally:
            del self._asked[question.ticket]

    async def aclose(self, *, drain_s: float = 0.0) -> None:
        """See `EngineClient.aclose`."""
        if self._closing:
            return
        self._closing = True
        try:
            if drain_s > 0 and self._failure is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(drain_s):
                        await self._idle.wait()
            await self._stop_process()
        finally:  # also when cancelled while waiting: nothing may be left behind
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            for task in self._tasks:
                task.cancel()
            self._fail(EngineDeadError("the server is shutting down"))
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._socket.close(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop_process(self) -> None:
        if self._process.returncode is None and self._ready is not None:
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        if self._process.returncode is None:  # stuck, or still loading, when it listens to nobody
            self._process.kill()
            await self._process.wait()

    # ------------------------------------------------------------------- wires

    def _send(self, message: EngineInput) -> None:
        """Send at once. Nothing is awaited, so a task that is cancelled or torn down loses no message.

        It has to be the asyncio socket that sends: sending on the plain socket beneath it would swallow the wake-up of
        a message that arrives meanwhile. Without a high-water mark a send is refused only where nobody is at the other
        end any more.
        """
        sent = self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)  # done already: nothing is ever queued
        if sent.exception() is not None:
            self._fail(EngineDeadError("the connection to the engine process is lost"))

    async def _read(self) -> EngineOutput:
        return self._decoder.decode(await self._socket.recv())

    async def _receive(self) -> None:
        """Hand outputs to their readers for as long as the engine lives."""
        try:
            while True:
                self._take(await self._read())
        except Exception as error:
            # Nobody waits for this task: whoever waits for an output has to hear of it.
            log.exception("reading from the engine process failed")
            self._fail(EngineDeadError(f"what the engine process sent can't be read: {error}"))

    def _take(self, message: EngineOutput) -> None:
        match message:
            case StepOutputs(outputs, stats):
                for output in outputs:
                    if output.finish_reason is not None:
                        self._unfinished.discard(output.request_id)
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                if stats is not None:
                    self._stats = stats
            case EngineFailed(message=words):
                self._fail(EngineDeadError(f"the engine failed: {words}"))
            case CacheFlushed(ticket) | CacheInspected(ticket):
                answer = self._asked.get(ticket)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case CacheChanged():
                if self._listener is not None:
                    self._listener(message)
            case EngineReady() | EngineProgress():
                pass

    async def _watch(self) -> None:
        """Notice the engine's death."""
        status = await self._process.wait()
        if status == FAILED_STATUS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), LAST_WORDS_S)
        self._fail(EngineDeadError(f"the engine process ended with status {status}"))

    def _fail(self, failure: EngineDeadError) -> None:
        if self._failure is None:
            self._failure = failure
            self._failed.set()
            for stream in self._streams.values():
                stream.fail(failure)
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(failure)
