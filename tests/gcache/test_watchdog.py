"""Deadlines of sockets that block: kept to, moved, taken back."""

import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from cygnet.gcache.protocol import REQUEST_MAGIC, Op, pack_request
from cygnet.gcache.runtime.watchdog import Watchdog
from cygnet.gcache.runtime.wire import DeadlineError, PeerClosedError, Piece, Wire


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    watchdog = Watchdog("test")
    ours, theirs = socket.socketpair()
    wire = Wire(ours, REQUEST_MAGIC, watchdog)
    yield wire, theirs
    wire.close()
    theirs.close()
    watchdog.close()


def test_reading_and_writing_end_at_the_deadline(pair: tuple[Wire, socket.socket]) -> None:
    wire, _ = pair
    wire.arm(time.monotonic() + 0.05)
    with pytest.raises(DeadlineError):
        wire.read_head()
    assert wire.expired
    assert not wire.disarm()


def test_a_write_that_nobody_takes_ends(pair: tuple[Wire, socket.socket]) -> None:
    wire, _ = pair
    wire.arm(time.monotonic() + 0.05)
    with pytest.raises(DeadlineError):
        wire.send([bytes(1 << 24), bytes(1 << 24)])


def test_an_earlier_deadline_than_the_last_is_kept(pair: tuple[Wire, socket.socket]) -> None:
    """The thread sleeps towards the first one when the second comes."""
    wire, _ = pair
    wire.arm(time.monotonic() + 60)
    wire.arm(time.monotonic() + 0.02)
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        wire.read_head()
    assert time.monotonic() - began < 5


def test_a_deadline_that_has_passed_is_told_at_once(pair: tuple[Wire, socket.socket]) -> None:
    with pytest.raises(DeadlineError):
        pair[0].arm(time.monotonic() - 1)


def test_what_was_taken_back_does_not_expire(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    wire.arm(time.monotonic() + 60)
    assert wire.disarm()
    wire.expire()  # the watchdog was about to, when it was taken back
    wire.arm(time.monotonic() + 60)
    wire.expire()  # or moved
    assert not wire.expired
    theirs.sendall(pack_request(Op.PING, 5))
    assert wire.read_head().request_id == 5


def test_frames_and_values_in_pieces(pair: tuple[Wire, socket.socket]) -> None:
    """Read ahead or not, cut anywhere: the same bytes, and the same hashes."""
    wire, theirs = pair
    value = bytes(range(256)) * 1200
    sender = threading.Thread(target=theirs.sendall, args=(pack_request(Op.PUT, 7, b"meta", body_bytes=9) + value,))
    sender.start()
    head = wire.read_head()
    assert (head.request_id, wire.read_bytes(head.meta_bytes)) == (7, b"meta")
    into = memoryview(bytearray(len(value)))
    cuts = [0, 1, 5000, 5001, 200_000, len(value)]
    pieces = [Piece(into[a:b], seed=a) for a, b in pairwise(cuts)]
    wire.read_pieces(pieces)
    sender.join()
    assert into == value
    whole = []
    for a, b in pairwise(cuts):
        piece = Piece(memoryview(value)[a:b], seed=a)
        piece.take(b - a)
        whole.append(piece.digest)
    assert [piece.digest for piece in pieces] == whole


def test_a_peer_that_leaves(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"GCQ1")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerClosedError):
        wire.read_head()
