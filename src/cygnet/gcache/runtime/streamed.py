"""Gets and puts in the order of a device's stream: what is put on the stream later finds the buffers filled.

    gets = StreamedCalls(client, max_calls=4)
    batch = gets.get_into(keys, pinned, stream, found=flags)     # begins at once, returns at once
    target.copy_(pinned, non_blocking=True)                      # on `stream`: begins when the batch has ended
    batch.outcomes()                                             # for the host, when it wants to know

A stream waits by running a function of the host's, which returns when the batch has ended. As a batch ends by its
deadline whatever servers do, so does the wait. What a get did not find leaves its buffer as nobody's; `found` says
which are good, in memory that the device can read.
"""

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.client import ANYWHERE, GCacheClient, Route
from cygnet.kv.store import Outcome

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Stream(Protocol):
    """Where a device's work is done in order."""

    def run_on_host(self, function: Callable[[], None]) -> None:
        """Have `function` called once all that was put on the stream before is done; later work waits for its end.

        Returns at once. `function` must not use the device.
        """


class StreamedBatch:
    """A batch on its way."""

    def __init__(self, future: "Future[list[Outcome]]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether it has ended. Never waits."""
        return self._future.done()

    def outcomes(self) -> list[Outcome]:
        """Per key, once it has ended; at its deadline at the latest. Raises what the call raised."""
        return self._future.result()


class StreamedCalls:
    """Calls of a client, on up to `max_calls` threads. Thread-safe. `close` ends the threads, not the client."""

    def __init__(self, client: GCacheClient, *, max_calls: int = 4) -> None:
        if max_calls < 1:
            raise ConfigError(f"a gcache client with {max_calls} calls at a time; give it at least 1")
        self._client = client
        self._threads = ThreadPoolExecutor(max_calls, thread_name_prefix="gcache-stream")

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        stream: Stream,
        *,
        found: "Buffer | None" = None,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> StreamedBatch:
        """Fill host buffers, beginning now. What is put on `stream` after this call waits for it.

        `found`: a byte per key, writable; 1 where the object is in its buffer, otherwise 0. Nobody may use the buffers
        before, so work on the stream that still reads them must be done already: see `put` for the other order.
        """
        flags = None if found is None else memoryview(found).cast("B")
        if flags is not None and (flags.readonly or len(flags) != len(keys)):
            raise ValueError(f"{len(keys)} keys, but {len(flags)} bytes of `found`, which must be writable")
        deadline = time.monotonic() + self._timeout(timeout_s)

        def get() -> list[Outcome]:
            left = deadline - time.monotonic()
            outcomes = self._client.batch_get_into(keys, buffers, timeout_s=left, route=route)
            if flags is not None:
                flags[:] = bytes(outcome is Outcome.OK for outcome in outcomes)
            return outcomes

        if flags is not None:
            flags[:] = bytes(len(flags))
        future = self._threads.submit(get)
        stream.run_on_host(partial(_wait, future))
        return StreamedBatch(future)

    def put(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        stream: Stream,
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> StreamedBatch:
        """Store host buffers once all that is on `stream` now is done, such as the copies that fill them.

        The stream goes on meanwhile: the buffers are free when the batch has ended. Its time begins when it does.
        """
        timeout_s = self._timeout(timeout_s)
        put = partial(self._client.batch_put, keys, buffers, ttl_ms=ttl_ms, timeout_s=timeout_s, route=route)
        future: Future[list[Outcome]] = Future()

        def begin() -> None:
            try:
                self._threads.submit(_fulfil, future, put)
            except RuntimeError:  # closed meanwhile
                future.set_result([Outcome.FAILED] * len(keys))

        stream.run_on_host(begin)
        return StreamedBatch(future)

    def close(self) -> None:
        """Wait for the calls that have begun."""
        self._threads.shutdown()

    def _timeout(self, timeout_s: float | None) -> float:
        return self._client.options.timeout_s if timeout_s is None else timeout_s


def _wait(future: "Future[list[Outcome]]") -> None:
    """Called by the stream: whatever the call raised is for whoever asks for the outcomes."""
    future.exception()


def _fulfil(future: "Future[list[Outcome]]", call: Callable[[], list[Outcome]]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_numbers = itertools.count(1)
_functions: dict[int, Callable[[], None]] = {}
"""What the driver has been given and has not called, by the number that it was given for it."""


@_HOST_FUNCTION
def _called(number: int) -> None:
    _functions.pop(number)()


class CudaStream:
    """A CUDA stream, by its handle (`torch.cuda.Stream.cuda_stream`). Not run on a GPU yet.

    `library` is the CUDA runtime that made the handle; by default the one that this process has loaded.
    """

    def __init__(self, handle: int, library: "ctypes.CDLL | None" = None) -> None:
        self._handle = handle
        self._library = library or ctypes.CDLL(None)
        if not hasattr(self._library, "cudaLaunchHostFunc"):
            raise ConfigError("no CUDA runtime is loaded in this process; import torch's CUDA build first")

    def run_on_host(self, function: Callable[[], None]) -> None:
        """Raises `ConfigError` when the runtime refuses."""
        number = next(_numbers)
        _functions[number] = function
        code = self._library.cudaLaunchHostFunc(ctypes.c_void_p(self._handle), _called, ctypes.c_void_p(number))
        if code:
            del _functions[number]
            raise ConfigError(f"the CUDA runtime takes no host function: error {code}")
