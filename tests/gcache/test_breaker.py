"""A failing server is left alone, and tried again by one call at a time."""

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.gcache.breaker import FIRST_PAUSE_NS, LONGEST_PAUSE_NS, Breaker
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, Means
from cygnet.gcache.runtime.peer_in_epoch import newer_view
from cygnet.gcache.runtime.wire import DeadlineError

S = 1_000_000_000


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(threshold=2)
    breaker.failed(0)
    breaker.succeeded()
    breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.allows(0)


def test_one_probe_at_a_time_and_its_success_closes() -> None:
    breaker = Breaker()
    breaker.failed(0)
    assert not breaker.allows(FIRST_PAUSE_NS - 1)
    assert breaker.allows(FIRST_PAUSE_NS)
    assert not breaker.allows(FIRST_PAUSE_NS), "a second probe"
    breaker.succeeded()
    assert breaker.allows(FIRST_PAUSE_NS)
    assert breaker.failures == 0


def test_failed_probes_pause_twice_as_long() -> None:
    breaker = Breaker()
    breaker.failed(0)
    now, pauses = 0, []
    for _ in range(8):
        pauses.append(breaker.open_until_ns - now)
        now = breaker.open_until_ns
        assert breaker.allows(now)
        breaker.failed(now)
    assert pauses[:3] == [FIRST_PAUSE_NS, 2 * FIRST_PAUSE_NS, 4 * FIRST_PAUSE_NS]
    assert pauses[-1] == LONGEST_PAUSE_NS


def test_calls_that_began_before_it_opened_do_not_count() -> None:
    """Ten calls that hang together are one piece of news."""
    breaker = Breaker()
    for _ in range(10):
        breaker.failed(0)
    assert breaker.failures == 1
    assert breaker.open_until_ns == FIRST_PAUSE_NS


@given(st.lists(st.tuples(st.sampled_from("sfa"), st.integers(0, 2 * S)), max_size=60))
def test_it_never_shuts_for_good(steps: list[tuple[str, int]]) -> None:
    """Whatever has happened: after the longest pause a call is let through, unless a probe is under way."""
    breaker, now = Breaker(), 0
    for what, pause in steps:
        now += pause
        if what == "s":
            breaker.succeeded()
        elif what == "f":
            breaker.failed(now)
        else:
            breaker.allows(now)
        assert breaker.is_open == (breaker.failures > 0)
    assert breaker.probing or breaker.allows(now + LONGEST_PAUSE_NS)


def test_a_late_answer_in_the_background_does_not_have_a_server_left_alone() -> None:
    """A client asks for news with little patience; operations may have more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = ClientOptions(io_threads=0, same_host=False)
        means = Means.of(options)
        peer = means.peer(Address("127.0.0.1", silent.getsockname()[1]), options)
        try:
            with pytest.raises(DeadlineError):
                newer_view(peer, 0, 0.05)
            assert not peer.is_failing
            with pytest.raises(DeadlineError), peer.channel(time.monotonic() + 0.05):
                pass
            assert peer.is_failing
        finally:
            peer.close()
            means.close(time.monotonic() + 5.0)
