"""The compiled core against what a peer may send: damaged frames and answers, cut anywhere."""

import os
import random
import socket
import struct
import threading

import pytest

from cygnet.gcache.protocol import REQUEST_MAGIC, Item, Op, Put, Want, pack_puts, pack_request, pack_wants
from cygnet.gcache.record import checksums, chunk_seed, pack_sums
from cygnet.gcache.runtime.compiled import compiled_core
from cygnet.gcache.runtime.watchdog import Watchdog
from cygnet.gcache.runtime.wire import PeerClosedError, Piece, Wire
from cygnet.kv.store import Outcome
from support.gcache import client, key, server

pytestmark = pytest.mark.skipif(compiled_core() is None, reason="the compiled core is not built")
KEYS = [key(number) for number in range(20)]
VALUES = [os.urandom(50 * number) for number in range(20)]


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """Some bytes are others, most of them in the head, or the end is missing."""
    data = bytearray(frame)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(min(len(data), 100 if chance.random() < 0.7 else len(data)))
        data[at] = chance.choice((0, 1, 255, chance.randrange(256)))
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)


def test_a_server_outlives_damaged_requests() -> None:
    chance = random.Random(1)
    with server() as running, client(running.port, same_host=False) as sdk:
        assert set(sdk.batch_put(KEYS, VALUES)) == {Outcome.OK}
        wants = [Want(name, len(value)) for name, value in zip(KEYS, VALUES, strict=True)]
        puts = [Put(n, len(v), pack_sums(checksums(n, v)), 0, 1) for n, v in zip(KEYS[1:], VALUES[1:], strict=True)]
        body = b"".join(VALUES[1:])
        gets = [pack_request(Op.GET, 7, pack_wants(wants[:count]), count=count) for count in (1, 2, 20)]
        many = pack_request(Op.PUT, 7, pack_puts(puts), count=len(puts), body_bytes=len(body)) + body
        one = pack_request(Op.PUT, 7, pack_puts(puts[:1]), count=1, body_bytes=50) + VALUES[1]
        for turn in range(400):
            with socket.create_connection(("127.0.0.1", running.port), timeout=20) as sock:
                try:
                    for frame in chance.choices((*gets, many, one), k=2):
                        sock.sendall(damaged(frame, chance))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
                except TimeoutError:
                    raise
                except OSError:
                    pass  # the server does not read what comes behind nonsense
            if turn % 100 == 0:
                assert sdk.audit() == []
        into = [bytearray(len(value)) for value in VALUES]
        outcomes = sdk.batch_get_into(KEYS, into)
        # Only what carried its checksum has been stored.
        assert all(o is not Outcome.OK or i == v for o, i, v in zip(outcomes, into, VALUES, strict=True))
        assert sdk.audit() == []


def test_a_client_outlives_damaged_answers() -> None:
    """Through a relay that damages what the server answers, once in a while."""
    chance = random.Random(2)
    with server() as running:
        with client(running.port, same_host=False) as sdk:
            sdk.batch_put(KEYS, VALUES)
        with relay(running.port, chance) as port:
            seen = set()
            for _ in range(150):
                with client(port, same_host=False, timeout_s=5.0) as sdk:
                    into = [bytearray(len(value)) for value in VALUES]
                    outcomes = sdk.batch_get_into(KEYS, into)
                    outcomes.append(sdk.get_into(KEYS[3], one := bytearray(150)))
                    into.append(one)
                seen |= set(outcomes)
                for outcome, got, value in zip(outcomes, into, [*VALUES, VALUES[3]], strict=True):
                    assert outcome is not Outcome.OK or got == value
            assert {Outcome.OK, Outcome.FAILED} <= seen


class relay:
    """A port in front of another: what comes back is damaged after the greeting, and the connection ends then."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port, self._chance = port, chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with near, socket.create_connection(("127.0.0.1", self._port)) as far:
                near.settimeout(20)
                far.settimeout(20)
                try:
                    for turn in range(3):
                        request = near.recv(1 << 16)
                        if not request:
                            break
                        far.sendall(request)
                        answer = self._frame(far)
                        if turn and self._chance.random() < 0.5:
                            near.sendall(damaged(answer, self._chance))
                            break
                        near.sendall(answer)
                except OSError:
                    continue

    def _frame(self, sock: socket.socket) -> bytes:
        data = sock.recv(40, socket.MSG_WAITALL)
        meta, body = struct.unpack_from("<IQ", data, 28)
        return data + sock.recv(meta + body, socket.MSG_WAITALL)


def test_puts_of_many_that_are_none_are_told() -> None:
    core = compiled_core()
    assert core is not None
    chance = random.Random(3)
    names, values = KEYS[:5], [b"", b"a", b"bc", b"def", b"ghij"]
    puts = [Put(n, len(v), pack_sums(checksums(n, v)), 0, 1 if v else 0, 9) for n, v in zip(names, values, strict=True)]
    meta, body = pack_puts(puts), memoryview(b"".join(values))
    told = core.unpack_small_puts(meta, body, 5)
    assert told is not None
    assert [(one[0], bytes(body[one[1] : one[1] + one[2]]), one[3], one[5]) for one in told] == [
        (name, value, 9, True) for name, value in zip(names, values, strict=True)
    ]
    for _ in range(2000):
        core.unpack_small_puts(damaged(meta, chance), body, chance.randrange(8))
    for end in range(len(meta)):
        assert core.unpack_small_puts(meta[:end], body, 5) is None
    assert core.unpack_small_puts(meta, body[:-1], 5) is None
    wrong = core.unpack_small_puts(meta, memoryview(bytes(len(body))), 5)
    assert wrong is not None
    assert [one[5] for one in wrong] == [True, False, False, False, False]


@pytest.mark.parametrize("compiled", [False, True])
def test_pieces_however_they_arrive(compiled: bool) -> None:
    """Values that were read ahead in part, in whole, or not at all, hashed or not, of all sizes."""
    chance = random.Random(4)
    watchdog = Watchdog("test")
    core = compiled_core(compiled)
    for _ in range(60):
        ours, theirs = socket.socketpair()
        wire = Wire(ours, REQUEST_MAGIC, watchdog, core)
        sizes = [chance.choice((1, 7, 4000, 5000, 150_000, 600_000)) for _ in range(chance.randrange(1, 7))]
        values = [os.urandom(size) for size in sizes]
        head = pack_request(Op.PING, 1, b"m" * chance.randrange(3000))
        sent = head + b"".join(values)

        def send(data: bytes = sent, sock: socket.socket = theirs) -> None:
            at = 0
            while at < len(data):
                step = chance.choice((1, 50, 4096, 70_000, 1 << 20))
                sock.sendall(data[at : at + step])
                at += step
            sock.close()

        sender = threading.Thread(target=send)
        sender.start()
        wire.read_bytes(wire.read_head().meta_bytes)
        into = [bytearray(size) for size in sizes]
        checked = [chance.random() < 0.7 for _ in sizes]
        pieces = [Piece(memoryview(i), chunk_seed(KEYS[0]), checked=c) for i, c in zip(into, checked, strict=True)]
        wire.read_pieces(pieces)
        assert into == values
        for piece, value, was_checked in zip(pieces, values, checked, strict=True):
            assert not was_checked or piece.digest == checksums(KEYS[0], value)[0]
        with pytest.raises(PeerClosedError):
            wire.read_pieces([Piece(memoryview(bytearray(10)), checked=False)])
        sender.join()
        wire.close()
    watchdog.close()


def test_an_answer_of_a_status_that_is_none_is_a_failure() -> None:
    with server() as running, client(running.port, same_host=False) as sdk:
        sdk.batch_put(KEYS[1:4], VALUES[1:4])
        running.cache.commit_all = lambda *_: [Item.OK, 77, Item.OK]  # type: ignore[assignment, list-item]
        assert sdk.batch_put(KEYS[1:4], VALUES[1:4]) == [Outcome.FAILED] * 3
