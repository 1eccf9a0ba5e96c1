"""Batches in a stream's order, without a device: a thread that does its work in order stands for the stream."""

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime import streamed
from cygnet.gcache.runtime.client import GCacheClient
from cygnet.gcache.runtime.streamed import CudaStream, StreamedCalls
from cygnet.kv.store import Outcome
from support.gcache import client, key, server


class ThreadStream:
    """Work in order, on a thread of its own, beginning when it is let."""

    def __init__(self) -> None:
        self.begin = threading.Event()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def run_on_host(self, function: Callable[[], None]) -> None:
        self._work.put(function)

    def end(self) -> None:
        self.begin.set()
        self._work.put(None)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream hangs"

    def _run(self) -> None:
        self.begin.wait(60)
        while (function := self._work.get(timeout=60)) is not None:
            function()


@pytest.fixture(scope="module")
def sdk() -> Iterator[GCacheClient]:
    with server() as running, client(running.port) as connected:
        yield connected


def test_what_comes_later_on_the_stream_finds_the_buffers_filled(sdk: GCacheClient) -> None:
    assert sdk.batch_put([key(1), key(2)], [b"first", b"second"]) == [Outcome.OK] * 2
    calls, stream = StreamedCalls(sdk), ThreadStream()
    buffers, found, seen = [bytearray(5), bytearray(6), bytearray(5)], bytearray(b"\x07\x07\x07"), []
    batch = calls.get_into([key(1), key(2), key("none")], buffers, stream, found=found)
    stream.run_on_host(lambda: seen.append((bytes(buffers[0]), bytes(buffers[1]), bytes(found))))
    stream.end()
    assert seen == [(b"first", b"second", b"\x01\x01\x00")]
    assert batch.is_done
    assert batch.outcomes() == [Outcome.OK, Outcome.OK, Outcome.MISS]
    calls.close()


def test_a_get_begins_at_once_and_the_stream_waits_for_its_end_only(sdk: GCacheClient) -> None:
    calls, stream = StreamedCalls(sdk, max_calls=1), ThreadStream()
    held, seen = threading.Event(), []
    real = sdk.batch_get_into

    def late(*args: object, **more: object) -> list[Outcome]:
        held.wait(60)
        return real(*args, **more)  # type: ignore[arg-type]

    sdk.batch_get_into = late  # type: ignore[method-assign]
    try:
        batch = calls.get_into([key("none")], [bytearray(1)], stream, found=bytearray(1))
        stream.run_on_host(lambda: seen.append(held.is_set()))
        stream.begin.set()
        assert not batch.is_done
        assert seen == []
        held.set()
        stream.end()
    finally:
        sdk.batch_get_into = real  # type: ignore[method-assign]
    assert seen == [True]
    calls.close()


def test_a_put_reads_its_buffers_when_the_stream_has_filled_them(sdk: GCacheClient) -> None:
    calls, stream = StreamedCalls(sdk), ThreadStream()
    buffer = bytearray(b"old")
    stream.run_on_host(lambda: buffer.__setitem__(slice(None), b"new"))
    batch = calls.put([key("put")], [buffer], stream)
    assert not batch.is_done, "the stream has not come so far"
    stream.end()
    assert batch.outcomes() == [Outcome.OK]
    assert sdk.get(key("put")) == b"new"
    calls.close()


def test_a_batch_that_raises_does_not_hold_up_the_stream(sdk: GCacheClient) -> None:
    calls, stream = StreamedCalls(sdk), ThreadStream()
    batches = [calls.get_into([b"no full key"], [bytearray(1)], stream), calls.put([b"neither"], [b"x"], stream)]
    stream.end()
    for batch in batches:
        with pytest.raises(ValueError, match="full key"):
            batch.outcomes()
    calls.close()
    late = ThreadStream()
    batch = calls.put([key(1)], [b"x"], late)
    late.end()
    assert batch.outcomes() == [Outcome.FAILED], "closed meanwhile"


def test_what_can_not_be_asked_for(sdk: GCacheClient) -> None:
    calls, stream = StreamedCalls(sdk), ThreadStream()
    for found in (bytearray(2), bytes(1)):
        with pytest.raises(ValueError, match="found"):
            calls.get_into([key(1)], [bytearray(5)], stream, found=found)
    with pytest.raises(ConfigError, match="at least 1"):
        StreamedCalls(sdk, max_calls=0)
    stream.end()
    calls.close()


class Runtime:
    """As much of CUDA's as is used: calls what it is given, from another thread."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.handles: list[int | None] = []

    def cudaLaunchHostFunc(
        self, handle: ctypes.c_void_p, function: Callable[[int], None], number: ctypes.c_void_p
    ) -> int:
        self.handles.append(handle.value)
        if not self.code:
            address = ctypes.cast(function, ctypes.c_void_p).value
            native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
            thread = threading.Thread(target=native, args=(number,))
            thread.start()
            thread.join(60)
        return self.code


def test_a_cuda_stream_has_the_driver_call_back() -> None:
    runtime, called = Runtime(), []
    stream = CudaStream(0x1234, runtime)  # type: ignore[arg-type]
    for number in range(3):
        stream.run_on_host(lambda number=number: called.append(number))  # type: ignore[misc]
    assert called == [0, 1, 2]
    assert runtime.handles == [0x1234] * 3
    with pytest.raises(ConfigError, match="error 700"):
        CudaStream(1, Runtime(700)).run_on_host(lambda: None)  # type: ignore[arg-type]
    assert not streamed._functions
    with pytest.raises(ConfigError, match="no CUDA runtime"):
        CudaStream(1, ctypes.CDLL(None))
