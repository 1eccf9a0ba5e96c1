"""Calls that are polled for: each result once, an fd that tells, bounds."""

import itertools
import os
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cygnet.gcache.runtime.polled import Polled


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def wait(polled: Polled[str]) -> None:
    assert select.select([polled.fd], [], [], 20)[0]
    os.eventfd_read(polled.fd)


def test_results_are_told_and_taken_once(threads: ThreadPoolExecutor) -> None:
    polled: Polled[str] = Polled(threads, 10, itertools.count().__next__)
    go = threading.Event()
    slow = polled.submit(lambda: str(go.wait(20)), lambda: "failed")
    assert polled.take(slow) is None
    quick = polled.submit(lambda: "done", lambda: "failed")
    wait(polled)
    assert (polled.take(slow), polled.take(quick), polled.take(quick)) == (None, "done", None)
    go.set()
    wait(polled)
    assert polled.take_all() == {slow: "True"}
    assert polled.take_all() == {}
    broken = polled.submit(lambda: str(1 // 0), lambda: "failed")
    wait(polled)
    assert polled.take(broken) == "failed"
    polled.close()
    polled.close()


def test_no_more_than_so_many(threads: ThreadPoolExecutor) -> None:
    polled: Polled[str] = Polled(threads, 2, itertools.count().__next__)
    go = threading.Event()
    waiting = [polled.submit(lambda: str(go.wait(20)), lambda: "failed") for _ in range(2)]
    refused = polled.submit(lambda: "done", lambda: "refused")
    wait(polled)
    assert polled.take(refused) == "refused"
    go.set()
    results: dict[int, str] = {}
    while len(results) < 2:
        wait(polled)
        results |= polled.take_all()
    assert results == dict.fromkeys(waiting, "True")
    for _ in range(5):  # nobody takes these
        last = polled.submit(lambda: "done", lambda: "failed")
        wait(polled)
    left = polled.take_all()
    assert len(left) == 2
    assert last in left
    polled.close()
