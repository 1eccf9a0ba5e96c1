"""A server as a client in any language sees it: frames over a socket, good ones and bad ones."""

import os
import socket
import time
from pathlib import Path
from struct import Struct

import msgspec
import numpy as np
import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.limits import MAX_BATCH, MAX_EXPIRY_NS, Limits
from cygnet.gcache.membership import Server as ClusterServer
from cygnet.gcache.membership import joined
from cygnet.gcache.protocol import (
    KEEP,
    Head,
    Item,
    Op,
    Put,
    Status,
    Want,
    pack_keys,
    pack_number,
    pack_puts,
    pack_request,
    pack_view,
    pack_wants,
    unpack_flags,
    unpack_gots,
    unpack_number,
    unpack_viewed,
)
from cygnet.gcache.record import CHUNK_BYTES, checksums, pack_sums
from cygnet.gcache.runtime.cluster import decode_view
from cygnet.gcache.runtime.node import ClusterOptions
from cygnet.gcache.runtime.registry import LocalRegistry
from cygnet.gcache.runtime.server import Server, ServerOptions
from cygnet.kv.store import Outcome
from support.gcache import MIB, answer, client, key, raw, server


def put_frame(name: bytes, value: bytes, request_id: int = 1, **changes: object) -> bytes:
    """A whole value, or with `changes` something else."""
    sums = checksums(name, value)
    fields: dict[str, object] = {
        "key": name,
        "value_bytes": len(value),
        "sums": Struct(f"<{len(sums)}Q").pack(*sums),
        "num_chunks": len(sums),
    }
    meta = pack_puts([Put(**{**fields, **changes})])  # type: ignore[arg-type]
    return pack_request(Op.PUT, request_id, meta, count=1, body_bytes=len(value)) + value


def get_frame(*names: bytes, request_id: int = 2) -> bytes:
    return pack_request(Op.GET, request_id, pack_wants([Want(name) for name in names]), count=len(names))


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
        return True
    except ConnectionError:
        return True


def trickle(sock: socket.socket, frame: bytes) -> bool:
    """Send a frame byte by byte, one each millisecond or so; whether the other side listened to the end."""
    sock.settimeout(0.001)
    for at in range(len(frame)):
        try:
            sock.sendall(frame[at : at + 1])
            if not sock.recv(1):
                return False
        except TimeoutError:
            continue
        except ConnectionError:
            return False
    return True


def test_frames_in_a_row_are_answered_in_order() -> None:
    with server() as running, raw(running) as sock:
        value = os.urandom(5000)
        sock.sendall(put_frame(key(1), value, 7) + get_frame(key(1), key(2), request_id=8))
        sock.sendall(pack_request(Op.PING, 9) + pack_request(Op.EXISTS, 10, pack_wants([Want(key(1), 5000)]), count=1))
        head, meta, _ = answer(sock)
        assert (head.op, head.request_id, list(meta)) == (Op.PUT, 7, [Item.OK])
        head, meta, body = answer(sock)
        assert (head.op, head.request_id, body) == (Op.GET, 8, value)
        found, missing = unpack_gots(meta, 2)
        assert (found.status, found.value_bytes, missing.status) == (Item.OK, 5000, Item.MISS)
        assert answer(sock)[0].request_id == 9
        assert unpack_flags(answer(sock)[1], 1) == [True]


def test_chunks_of_a_value() -> None:
    with server() as running, raw(running) as sock, client(running.port) as sdk:
        value = os.urandom(2 * CHUNK_BYTES + 10)
        sdk.put(key(1), value)
        for first, count, size in ((0, 1, CHUNK_BYTES), (1, 0, CHUNK_BYTES + 10), (2, 9, 10), (3, 1, 0), (9, 1, 0)):
            want = Want(key(1), first_chunk=first, num_chunks=count)
            sock.sendall(pack_request(Op.GET, 1, pack_wants([want]), count=1))
            _, meta, body = answer(sock)
            got = unpack_gots(meta, 1)[0]
            assert got.status == Item.OK
            assert body == value[first * CHUNK_BYTES :][:size]
            assert len(got.sums) == 8 * got.num_chunks


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\nHost: gcache\r\n\r\n" + bytes(40),
        bytes(64),
        Head.pack(b"GCQ1", Op.GET, 0, MAX_BATCH + 1, 1, 0, 0, 0, 0),
        Head.pack(b"GCQ1", Op.PUT, 0, 1, 1, 0, 0, 0, 1 << 40),
        pack_request(99, 1),  # type: ignore[arg-type]
        pack_request(Op.GET, 1, b"", count=3),
        pack_request(Op.GET, 1, b"\xff" * 30, count=1),
        pack_request(Op.DELETE, 1, pack_keys([b"\0a"]) + b"more", count=1),
        pack_request(Op.PING, 1, body_bytes=10),
        pack_request(Op.HELLO, 1, b"no json"),
        put_frame(key(1), b"abc", num_chunks=2),
        pack_request(Op.PUT, 1, pack_puts([Put(key(1), 10, bytes(8), 0, 1)]), count=1, body_bytes=11),
        pack_request(Op.VIEW, 1, b"\xff\xff\xff\xff", count=0),
    ],
)
def test_what_is_no_frame_is_refused_with_a_reason(frame: bytes) -> None:
    with server() as running:
        with raw(running) as sock:
            sock.sendall(frame)
            head, meta, _ = answer(sock)
            assert head.code == Status.BAD_REQUEST
            assert meta.decode()
            assert is_closed(sock)
        with client(running.port) as sdk:
            assert sdk.audit() == []
            assert sdk.stats()[running.service.info.server_id]["objects"] == 0


def test_random_bytes_do_no_harm() -> None:
    """From the first byte on, and behind a good head; afterwards all memory is free, and others are served."""
    random = np.random.default_rng(5)
    with server(limits=Limits(frame_timeout_s=0.2)) as running:
        for turn in range(150):
            with raw(running) as sock:
                data = random.bytes(int(random.integers(1, 3000)))
                if turn % 2:
                    op, meta, body = (int(random.integers(0, n)) for n in (12, len(data) + 20, 5000))
                    head = Head.pack(b"GCQ1", op, turn % 3, int(random.integers(0, 9)), 1, 0, 50, meta, body)
                    data = head + data
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)
        with client(running.port) as sdk:
            assert sdk.put(key(1), b"value").value == "ok"
            assert sdk.get(key(1)) == b"value"
            assert sdk.audit() == []
            stats = sdk.stats()[running.service.info.server_id]
            assert (stats["objects"], stats["memory_bytes"], stats["uploads"]) == (1, 512, 0)


def test_a_put_with_other_bytes_than_its_checksum_is_never_found() -> None:
    with server() as running, raw(running) as sock:
        frame = bytearray(put_frame(key(1), bytes(5000)))
        frame[-1] ^= 1
        sock.sendall(frame + get_frame(key(1)))
        assert list(answer(sock)[1]) == [Item.TORN]
        assert unpack_gots(answer(sock)[1], 1)[0].status == Item.MISS
        assert running.cache.audit() == []
        assert running.stats()["memory_bytes"] == 0


def test_a_put_cut_short_leaves_nothing() -> None:
    with server() as running:
        with raw(running) as sock:
            sock.sendall(put_frame(key(1), bytes(3 * MIB))[:-1])
        with raw(running) as sock:
            sock.sendall(put_frame(key(1), b"short"))
            assert list(answer(sock)[1]) == [Item.OK], "and does not stand in the way of the next"
        running.close()
        assert running.cache.arena.used_bytes == 512


def test_a_put_that_trickles_is_given_up() -> None:
    """However busy it looks."""
    with server(limits=Limits(frame_timeout_s=0.15)) as running, raw(running) as sock:
        frame = put_frame(key(1), bytes(3000))
        assert not trickle(sock, frame), "it was let go on to the end"
        running.close()
        assert running.cache.arena.used_bytes == 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_head_that_has_begun_must_come_to_its_end(compiled: bool, token: str) -> None:
    """Whether it is the first or not, and whoever waits for it; before the first byte any time may pass."""
    own = Limits(frame_timeout_s=0.2)
    with server(limits=own, compiled=compiled, token=token) as running:
        with raw(running) as sock:
            time.sleep(0.5)
            sock.sendall(b"GCQ1\x03")
            assert is_closed(sock)
        if not token:
            with raw(running) as sock:
                sock.sendall(put_frame(key(1), b"value") + get_frame(key(1)) + get_frame(key(1))[:9])
                assert list(answer(sock)[1]) == [Item.OK]
                assert answer(sock)[2] == b"value"
                assert is_closed(sock)


def test_a_refused_value_is_read_away() -> None:
    """The connection stays usable, and its neighbours in the batch are stored."""
    with server(limits=Limits(max_value_bytes=4000, max_key_bytes=100)) as running, raw(running) as sock:
        sock.sendall(put_frame(key(1), bytes(5 * MIB)) + put_frame(key("x" * 200), b"a") + put_frame(key(2), b"abc"))
        assert [list(answer(sock)[1]) for _ in range(3)] == [[Item.FULL], [Item.FULL], [Item.OK]]


def test_slices_in_any_order_become_a_value() -> None:
    value = os.urandom(2 * CHUNK_BYTES + 10)
    sums = checksums(key(1), value)

    def slice_(chunk: int, upload: int, data: bytes) -> bytes:
        put = Put(key(1), len(value), sums[chunk].to_bytes(8, "little"), chunk, 1, 0, upload)
        return pack_request(Op.PUT, 1, pack_puts([put]), count=1, body_bytes=len(data)) + data

    def chunk(number: int) -> bytes:
        return value[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    with server() as running, raw(running) as sock, raw(running) as other:
        for number, item in ((2, Item.PART), (0, Item.PART)):
            sock.sendall(slice_(number, 5, chunk(number)) + get_frame(key(1)))
            assert list(answer(sock)[1]) == [item]
            assert unpack_gots(answer(sock)[1], 1)[0].status == Item.MISS, "found before it was whole"
        other.sendall(slice_(1, 6, chunk(1)))
        assert list(answer(other)[1]) == [Item.PART], "another upload of the same key"
        other.sendall(slice_(1, 5, chunk(1)))
        assert list(answer(other)[1]) == [Item.OK]
        sock.sendall(get_frame(key(1)))
        assert answer(sock)[2] == value
        other.sendall(slice_(0, 7, bytes(CHUNK_BYTES)))
        assert list(answer(other)[1]) == [Item.TORN]
        assert running.stats()["uploads"] == 1, "a torn upload is over; the other one still waits"
        running.service.uploads.expire(everything=True)
        assert running.cache.audit() == []
        assert running.stats()["objects"] == 1


def test_an_abandoned_upload_ends() -> None:
    with server(limits=Limits(upload_timeout_s=0, max_uploads=1)) as running, raw(running) as sock:
        for upload in (1, 2):
            value = bytes(CHUNK_BYTES)
            put = Put(key(1), 2 * CHUNK_BYTES, checksums(key(1), value)[0].to_bytes(8, "little"), 0, 1, 0, upload)
            sock.sendall(pack_request(Op.PUT, 1, pack_puts([put]), count=1, body_bytes=CHUNK_BYTES) + value)
            assert list(answer(sock)[1]) == [Item.PART]
        assert running.stats()["uploads"] == 1


def test_tokens() -> None:
    def hello(token: str) -> bytes:
        return pack_request(Op.HELLO, 1, msgspec.json.encode({"version": 1, "token": token}))

    with server(token="secret") as running:
        long = Head.pack(b"GCQ1", Op.HELLO, 0, 0, 1, 0, 0, 16 << 20, 0)
        for frame in (get_frame(key(1)), hello("wrong"), hello(""), long):
            with raw(running) as sock:
                sock.sendall(frame)
                assert answer(sock)[0].code == Status.DENIED
                assert is_closed(sock)
        with raw(running) as sock:
            sock.sendall(hello("secret") + pack_request(Op.PING, 2))
            assert [answer(sock)[0].code for _ in range(2)] == [Status.OK, Status.OK]


def test_too_many_connections_are_told_so() -> None:
    with server(limits=Limits(max_connections=2)) as running:
        with raw(running) as first, raw(running) as second:
            for sock in (first, second):
                sock.sendall(pack_request(Op.PING, 1))
                answer(sock)
            with raw(running) as third:
                head, meta, _ = answer(third)
                assert head.code == Status.BUSY
                assert b"raise --max-connections" in meta
        assert running.refused == 1


def test_another_epoch_is_told_and_nothing_done() -> None:
    own = ClusterOptions(LocalRegistry(), "test")
    with server(server_id="a", cluster=own) as running, raw(running) as sock:
        now = running.service.cluster.epoch
        frame = bytearray(put_frame(key(1), b"abc"))
        for epoch, status in ((now - 1, Status.WRONG_EPOCH), (0, Status.WRONG_EPOCH), (now, Status.OK)):
            frame[16:24] = epoch.to_bytes(8, "little")
            sock.sendall(frame)
            head, meta, _ = answer(sock)
            assert (head.code, head.epoch) == (status, now)
            assert running.stats()["objects"] == (1 if epoch == now else 0)
            if epoch != now:
                assert decode_view(meta) == running.service.cluster.view
        newer = joined(running.service.cluster.view, ClusterServer("b", "127.0.0.1", 1))
        for view, rises in ((b"nonsense", 0), (msgspec.json.encode(newer), 1), (msgspec.json.encode(newer), 1)):
            with raw(running) as other:
                other.sendall(pack_request(Op.ADOPT, 1, view))
                assert answer(other)[0].code == (Status.OK if rises else Status.BAD_REQUEST)
            assert running.service.cluster.epoch == now + rises
        sock.sendall(pack_request(Op.MEMBERS, 1, pack_number(now)))
        assert decode_view(answer(sock)[1]) == newer
        sock.sendall(pack_request(Op.MEMBERS, 1, pack_number(now + 1)))
        assert answer(sock)[1] == b""


def test_a_put_that_keeps_what_is_there() -> None:
    """Whole or in slices, at whatever moment the other value comes."""
    value = bytes(CHUNK_BYTES) + b"more"
    sums = pack_sums(checksums(key(1), value))
    slices = [
        Put(key(1), len(value), sums[:8], 0, 1, upload=7),
        Put(key(1), len(value), sums[8:], 1, 1, upload=7),
    ]
    with server() as running, raw(running) as sock, client(running.port) as sdk:

        def send(put: Put, data: bytes) -> int:
            meta, body = pack_number(ticket) + pack_puts([put]), put.body_bytes
            sock.sendall(pack_request(Op.PUT, 1, meta, count=1, flags=KEEP, body_bytes=body) + data)
            return answer(sock)[1][0]

        sock.sendall(pack_request(Op.TICKET, 1))
        ticket, _ = unpack_number(answer(sock)[1])
        assert send(slices[0], value[:CHUNK_BYTES]) == Item.PART
        assert sdk.put(key(1), b"newer") is Outcome.OK
        assert send(slices[1], value[CHUNK_BYTES:]) == Item.OK
        assert send(Put(key(1), 3, pack_sums(checksums(key(1), b"abc")), 0, 1), b"abc") == Item.OK
        assert sdk.get(key(1)) == b"newer"
        assert send(Put(key(2), 3, pack_sums(checksums(key(2), b"abc")), 0, 1), b"abc") == Item.OK
        assert sdk.get(key(2)) == b"abc"
        running.service.uploads.expire(everything=True)
        assert sdk.audit() == []


def test_what_has_expired_is_not_found() -> None:
    with server(compiled=False) as running, client(running.port) as sdk:  # the compiled core has the system's clock
        now = time.time_ns()
        running.cache.memory.wall_ns = lambda: now
        sdk.put(key(1), b"abc", ttl_ms=1000)
        sdk.put(key(2), b"abc")
        assert sdk.batch_exists([key(1), key(2)]) == [True, True]
        now += 1_000_000_000
        assert sdk.batch_exists([key(1), key(2)]) == [False, True]
        assert sdk.get(key(1)) != b"abc"
        assert sdk.remove([key(1), key(2)]) == [False, True]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_time_to_live_may_be_any_number(compiled: bool) -> None:
    """What would end later than a record can tell ends when the latest do."""
    longest = (1 << 64) - 1
    with server(compiled=compiled) as running, client(running.port, compiled=compiled) as sdk:
        names = [key(number) for number in range(5)]
        assert sdk.put(names[0], b"abc", ttl_ms=longest) is Outcome.OK
        assert set(sdk.batch_put(names[1:4], [b"abc"] * 3, ttl_ms=1 << 55)) == {Outcome.OK}
        assert sdk.put(names[4], bytes(3 * MIB), ttl_ms=longest) is Outcome.OK
        assert sdk.batch_exists(names) == [True] * 5
        assert sdk.get(names[0]) == b"abc"
        assert {entry.expiry_ns for entry in running.cache.arena.entries()} == {MAX_EXPIRY_NS}
        assert sdk.audit() == []


def test_leases_end_with_their_connection_and_are_bounded() -> None:
    with server(4 * MIB, limits=Limits(max_leased_fraction=0.5)) as running, client(running.port) as sdk:
        for number in range(3):
            sdk.put(key(number), bytes(MIB))
        with raw(running, unix=True) as sock:
            wants = [Want(key(number)) for number in range(3)]
            sock.sendall(pack_request(Op.VIEW, 1, pack_view([], wants), count=3))
            viewed = unpack_viewed(answer(sock)[1], 3)
            assert [one.status for one in viewed] == [Item.OK, Item.FAILED, Item.FAILED]
            assert running.stats()["leases"] == 1
            sock.sendall(pack_request(Op.VIEW, 1, pack_view([viewed[0].lease, 999], wants[1:2]), count=1))
            assert unpack_viewed(answer(sock)[1], 1)[0].status == Item.OK
        running.close()
        assert running.stats()["leases"] == 0


def test_a_restart_finds_everything_again() -> None:
    """Without any word of goodbye from the old server: what is in the arena counts."""
    with server() as running, client(running.port) as sdk:
        values = {key(number): os.urandom(1000 * number) for number in range(1, 200)}
        sdk.batch_put(list(values), list(values.values()))
        options = running.options
        running.close()
        again = Server(options)
        try:
            with client(again.port) as other:
                assert again.cache.shared.reused
                assert {name: other.get(name) for name in values} == values
                assert other.audit() == []
        finally:
            again.close()


def test_damaged_bytes_in_the_arena_are_torn_not_wrong() -> None:
    with server() as running, client(running.port) as sdk:
        sdk.batch_put([key(1), key(2)], [b"a" * 5000, b"b" * 5000])
        options = running.options
        running.close()
        assert options.arena is not None
        arena = options.arena / "arena"
        data = bytearray(arena.read_bytes())
        data[data.index(b"a" * 5000) + 77] ^= 1
        with arena.open("r+b") as file:
            file.write(data)
        again = Server(options)
        try:
            for same_host in (True, False):
                with client(again.port, same_host=same_host) as other:
                    assert other.get(key(1)) != b"a" * 5000
                    assert other.get_into(key(2), bytearray(5000)).value == "ok"
                    assert other.audit() == []
            assert again.stats()["torn_objects"] == 1
        finally:
            again.close()


def test_a_server_that_cannot_start_says_why() -> None:
    with server() as running:
        options = running.options
        for changes, words in (
            ({"port": running.port}, "choose another --port"),
            ({"arena": options.arena}, "another gcache server uses the arena"),
            ({"memory_bytes": 1 << 60}, "give less --memory"),
            ({"memory_bytes": 1000}, "1MiB or more"),
            ({"host": "192.0.2.1"}, "can't listen on 192.0.2.1"),
            ({"disk": options.arena, "disk_bytes": MIB}, "holds other files"),
        ):
            assert options.arena is not None
            plain = ServerOptions(port=0, memory_bytes=MIB, arena=options.arena.parent / "other")
            with pytest.raises(ConfigError, match=words):
                Server(changed(plain, changes))


def test_a_folder_that_someone_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cygnet.gcache.runtime.shared_memory.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Server(ServerOptions(port=0, memory_bytes=MIB, arena=tmp_path))


def changed(options: ServerOptions, changes: dict[str, object]) -> ServerOptions:
    return ServerOptions(**{**vars(options), **changes})  # type: ignore[arg-type]
