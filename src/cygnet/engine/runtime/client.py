"""The engine as seen from the API process: starts the engine process and speaks to it."""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from cygnet.base.config import Config
from cygnet.base.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from cygnet.base.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineProgress,
    EngineReady,
    EngineStart,
    EngineStats,
    FlushCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while the engine loads; a total of 0 means unknown."""

_ERRORS = {error.__name__: error for error in (InvalidRequestError, ContextLengthError, QueueFullError)}
"""What an engine may say of a request, by name."""

START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 10.0


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


class EngineProcess:
    """An engine in a process of its own. Implements `EngineClient`; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, limit: int) -> None:
        self._process = process
        self._socket = socket
        self._limit = limit
        self._streams: dict[str, Stream] = {}
        self._ready: EngineReady | None = None
        self._stats = EngineStats()
        self._failure: EngineDeadError | None = None
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineOutput)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._folder: Path | None = None

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
        """Start an engine and wait until it is ready.

        Raises `ConfigError` with the engine's own words when it can't start. `on_progress` is called while it loads.
        """
        # A private folder: only this user can reach the socket.
        folder = Path(tempfile.mkdtemp(prefix="cygnet-"))
        address = f"ipc://{folder}/engine.sock"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cygnet.engine.runtime.process",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        client = cls(process, socket, config.engine.max_waiting + config.engine.max_num_seqs)
        client._folder = folder
        message = EngineStart(config=config, address=address, eos_token_ids=list(eos_token_ids), log_level=log_level)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            await process.stdin.drain()
            async with asyncio.timeout(START_TIMEOUT_S):
                await client._wait_ready(on_progress)
        except BaseException:
            await client.aclose()
            raise
        client._tasks = [
            asyncio.create_task(client._receive(), name="engine-receive"),
            asyncio.create_task(client._watch(), name="engine-watch"),
        ]
        return client

    async def _wait_ready(self, on_progress: Progress) -> None:
        died = asyncio.create_task(self._process.wait())
        try:
            while True:
                received = asyncio.create_task(self._read())
                await asyncio.wait({died, received}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    # Its last words may still be on their way.
                    await asyncio.wait({received}, timeout=1.0)
                if not received.done():
                    received.cancel()
                    raise ConfigError(f"the engine process ended at start with status {self._process.returncode}")
                match received.result():
                    case EngineReady() as ready:
                        self._ready, self._stats = ready, ready.stats
                        return
                    case EngineProgress(stage, done, total):
                        on_progress(stage, done, total)
                    case EngineFailed(message=message):
                        raise ConfigError(message)
        finally:
            died.cancel()

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
        self._idle.clear()
        finished = False
        try:
            await self._send(request)
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
            if not self._streams:
                self._idle.set()
            if not finished and self._failure is None:
                # No await that a cancelled task could lose: the message goes out even while we are torn down.
                self._send_soon(AbortRequests([request.request_id]))

    def _check(self, request: AddRequest) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", request_id=request.request_id)
        if len(self._streams) >= self._limit:
            raise QueueFullError(
                f"{len(self._streams)} requests are running or waiting, the limit of this server",
                request_id=request.request_id,
            )

    async def flush_cache(self) -> None:
        """See `EngineClient.flush_cache`."""
        if self._failure is not None:
            raise self._failure
        await self._send(FlushCache())

    async def aclose(self, *, drain_s: float = 0.0) -> None:
        """See `EngineClient.aclose`."""
        if self._closing:
            return
        self._closing = True
        if drain_s > 0 and self._failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        await self._stop_process()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(EngineDeadError("the server is shutting down"))
        self._socket.close(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop_process(self) -> None:
        if self._process.returncode is None:
            self._send_soon(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    # ------------------------------------------------------------------- wires

    async def _send(self, message: EngineInput) -> None:
        await self._socket.send(self._encoder.encode(message))

    def _send_soon(self, message: EngineInput) -> None:
        # The socket has no high-water mark, so this never blocks.
        with contextlib.suppress(zmq.ZMQError):
            zmq.Socket.send(zmq.Socket.shadow(self._socket), self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> EngineOutput:
        return self._decoder.decode(await self._socket.recv())

    async def _receive(self) -> None:
        """Hand outputs to their readers for as long as the engine lives."""
        while True:
            match await self._read():
                case StepOutputs(outputs, stats):
                    for output in outputs:
                        stream = self._streams.get(output.request_id)
                        if stream is not None:
                            stream.put(output)
                    if stats is not None:
                        self._stats = stats
                case EngineFailed(message=message):
                    self._fail(EngineDeadError(f"the engine failed: {message}"))
                case EngineReady() | EngineProgress():
                    pass

    async def _watch(self) -> None:
        """Notice the engine's death."""
        status = await self._process.wait()
        await asyncio.sleep(0)
        self._fail(EngineDeadError(f"the engine process ended with status {status}"))

    def _fail(self, failure: EngineDeadError) -> None:
        if self._failure is None:
            self._failure = failure
            for stream in self._streams.values():
                stream.fail(failure)
