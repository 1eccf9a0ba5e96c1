"""The server as Redis clients see it: redis-py over RESP2 and RESP3, redis-cli, redis-benchmark, and hostile ones."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from cygnet.gcache.limits import Limits
from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.server import Server
from cygnet.kv.store import Outcome
from support.gcache import MIB, client, server


@contextmanager
def redis(running: Server, **options: object) -> Iterator[Redis]:
    once = Retry(NoBackoff(), 0)
    with Redis(port=running.resp_port or 0, socket_timeout=20, retry=once, **options) as connected:  # type: ignore
        yield connected


@pytest.fixture(params=[2, 3])
def door(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Redis]]:
    with server(resp_port=0) as running, redis(running, protocol=request.param) as connected:
        yield running, connected


def test_strings(door: tuple[Server, Redis]) -> None:
    running, db = door
    assert db.ping()
    assert db.echo("hi") == b"hi"
    assert db.set("a", b"1")
    assert db.get("a") == b"1"
    assert db.get("none") is None
    big = bytes(range(256)) * (3 * MIB // 256) + b"x"
    assert db.set("big", big)
    assert db.get("big") == big
    assert db.strlen("big") == len(big)
    assert db.set("empty", b"")
    assert db.get("empty") == b""
    assert db.mset({"x": b"1", "ns:y": b"2"})
    assert db.mget("x", "none", "ns:y", "empty") == [b"1", None, b"2", b""]
    assert db.exists("x", "x", "none") == 2
    assert db.type("x") == b"string"
    assert db.dbsize() == 5
    assert db.delete("x", "ns:y", "none") == 2
    assert db.unlink("big") == 1
    assert sorted(db.scan_iter()) == [b"a", b"empty"]
    assert db.flushdb()
    assert db.dbsize() == 0
    assert running.cache.audit() == []


def test_conditions_and_times(door: tuple[Server, Redis]) -> None:
    running, db = door
    now = 10**18
    running.cache.memory.wall_ns = lambda: now
    assert db.set("a", b"1", xx=True) is None
    assert db.set("a", b"1", nx=True)
    assert db.set("a", b"2", nx=True) is None
    assert db.get("a") == b"1"
    assert (db.ttl("a"), db.pttl("a"), db.ttl("none")) == (-1, -1, -2)
    assert db.set("a", b"3", ex=100, xx=True)
    assert (db.ttl("a"), db.pttl("a")) == (100, 100_000)
    assert db.persist("a")
    assert db.ttl("a") == -1
    assert not db.persist("a")
    assert db.expire("a", 10)
    assert db.pexpire("a", 5000)
    assert not db.expire("none", 10)
    assert db.get("a") == b"3"
    assert db.set("empty", b"")
    assert db.expire("empty", 10)
    assert db.get("empty") == b""
    now += 4999 * 10**6
    assert db.pttl("a") == 1
    now += 10**6
    assert db.get("a") is None
    assert db.exists("a") == 0
    assert db.ttl("a") == -2
    assert db.set("a", b"4", nx=True), "what has expired is not there"
    assert db.execute_command("SETEX", "b", 1, b"5")
    assert db.execute_command("PSETEX", "c", 1500, b"6")
    assert db.execute_command("SETNX", "d", b"7")
    assert not db.execute_command("SETNX", "d", b"8")
    assert (db.ttl("b"), db.pttl("c"), db.get("d")) == (1, 1500, b"7")
    assert running.cache.audit() == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("NONSENSE",), "unknown command"),
        (("GET",), "wrong number of arguments"),
        (("MSET", "a"), "wrong number of arguments"),
        (("SET", "a", "b", "EX", "0"), "invalid expire"),
        (("SET", "a", "b", "EX", "x"), "not an integer"),
        (("SET", "a", "b", "NX", "XX"), "syntax error"),
        (("SET", "a", "b", "KEEPTTL"), "EX, PX, NX and XX"),
        (("SET", "", "b"), "a name has 1 to"),
        (("SELECT", "1"), "one database"),
        (("CONFIG", "SET", "a", "b"), "GET only"),
        (("AUTH", "x"), "without a token"),
        (("SCAN", "x"), "not an integer"),
        (("SCAN", "0", "COUNT"), "syntax error"),
        (("HELLO", "4"), "unsupported protocol"),
        (("SET", "a", b"x" * (2 * MIB)), "does not fit"),
    ],
)
def test_mistakes_are_answered_and_forgiven(words: tuple[str, ...], kind: str) -> None:
    with server(resp_port=0, limits=Limits(max_value_bytes=MIB)) as running, redis(running) as db:
        with pytest.raises(ResponseError, match=kind):
            db.execute_command(*words)
        assert db.ping()


def test_scan_names_everything_that_stays(door: tuple[Server, Redis]) -> None:
    running, db = door
    stays = {b"stay:%d" % number for number in range(300)}
    for name in stays:
        db.set(name, b"x")
    running.cache.reserve(full_key(b"", b"not yet there"), 5, 0, 0.0)
    seen: list[bytes] = []
    cursor, rounds = 0, 0
    while True:
        cursor, found = db.scan(cursor, count=50)
        seen += found
        rounds += 1
        db.set(b"new:%d" % rounds, b"x")
        if not cursor:
            break
    assert rounds >= 6
    assert stays <= set(seen)
    assert len([name for name in seen if name in stays]) == 300
    assert sorted(db.scan_iter(match="stay:1?", count=100)) == [b"stay:%d" % number for number in range(10, 20)]
    assert list(db.scan_iter(_type="list")) == []


def test_both_doors_lead_to_the_same_objects(door: tuple[Server, Redis]) -> None:
    running, db = door
    with client(running.port) as sdk:
        assert sdk.put(full_key(b"files", b"a:b"), b"value") is Outcome.OK
        assert db.get("files:a:b") == b"value"
        db.set("files:c", b"other")
        assert sdk.get(full_key(b"files", b"c")) == b"other"
        sdk.put(full_key(b"", b"a:b"), b"no Redis client can name this")
        assert sorted(db.scan_iter()) == [b"files:a:b", b"files:c"]
        stats = sdk.stats()[running.service.info.server_id]
        assert (stats["gets"], stats["objects"]) == ({"ok": 2}, 3)


def test_what_is_on_the_disk_alone(tmp_path: object) -> None:
    with server(4 * MIB, resp_port=0, disk=tmp_path, disk_bytes=64 * MIB) as running, redis(running) as db:
        for number in range(12):
            db.set(f"k{number}", b"%d" % number * MIB)
        assert db.set("k0", b"again", nx=True) is None
        assert db.get("k1") == b"1" * MIB
        assert db.expire("k2", 100)
        assert db.ttl("k2") == 100
        assert db.set("k3", b"new", xx=True)
        assert db.get("k3") == b"new"
        assert running.cache.audit() == []


def test_tokens() -> None:
    with server(resp_port=0, token="secret") as running:
        with redis(running) as db, pytest.raises((AuthenticationError, NoPermissionError)):
            db.ping()
        for protocol in (2, 3):
            with redis(running, password="secret", protocol=protocol) as db:
                assert db.set("a", b"x" * 100_000)
            with redis(running, password="wrong", protocol=protocol) as db, pytest.raises(AuthenticationError):
                db.ping()
        with raw(running) as sock:
            sock.sendall(b"*2\r\n$4\r\nAUTH\r\n$5000\r\n")
            assert sock.recv(100).startswith(b"-ERR Protocol error: invalid bulk length"), "strangers get no memory"
            assert sock.recv(100) == b""


@contextmanager
def raw(running: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.resp_port or 0)) as sock:
        sock.settimeout(20)
        yield sock


def test_a_pipeline_is_answered_in_order() -> None:
    with server(resp_port=0) as running, redis(running) as db:
        line = db.pipeline(transaction=False)
        for number in range(2000):
            line.set(f"k{number % 7}", b"%d" % number)
            line.get(f"k{number % 7}")
        assert line.execute()[1::2] == [b"%d" % number for number in range(2000)]


def test_answers_that_nobody_reads_end_the_connection() -> None:
    with server(resp_port=0, limits=Limits(frame_timeout_s=0.3)) as running, raw(running) as sock:
        with redis(running) as db:
            db.set("a", bytes(4 * MIB))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET a\r\n" * 20)
        assert wait_for(lambda: running.stats()["connections"] == 0)
        assert running.cache.audit() == []


def wait_for(true: object) -> bool:
    done = threading.Event()
    for _ in range(2000):
        if true():  # type: ignore[operator]
            return True
        done.wait(0.01)
    return False


def test_a_command_that_trickles_is_given_up() -> None:
    with server(resp_port=0, limits=Limits(frame_timeout_s=0.2)) as running, raw(running) as sock:
        sock.sendall(b"*1\r\n$4\r\n")
        assert sock.recv(10) == b""
        assert wait_for(lambda: running.stats()["connections"] == 0)


def test_too_many_connections_are_told_so() -> None:
    with server(resp_port=0, limits=Limits(max_connections=1)) as running, redis(running) as db:
        db.ping()
        with raw(running) as sock:
            assert sock.recv(100).startswith(b"-ERR 1 connections are open")


@pytest.mark.parametrize(
    "data", [b"\0" * 100_000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$99999999999\r\n"]
)
def test_garbage_does_no_harm(data: bytes) -> None:
    with server(resp_port=0) as running:
        with raw(running) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        with redis(running) as db:
            assert db.ping()


def test_redis_cli_and_benchmark() -> None:
    if shutil.which("redis-cli") is None or shutil.which("redis-benchmark") is None:
        pytest.skip("needs redis-cli and redis-benchmark (Debian: apt-get install redis-tools)")
    with server(resp_port=0, token="secret") as running:
        port = str(running.resp_port)

        def cli(*words: str) -> str:
            command = ["redis-cli", "-p", port, "-a", "secret", "--no-auth-warning", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

        assert cli("SET", "files:a", "1") == "OK"
        assert cli("-3", "GET", "files:a") == "1"
        assert cli("--scan", "--pattern", "files:*") == "files:a"
        assert "redis_version:7" in cli("INFO")
        done = subprocess.run(
            ["redis-benchmark", "-p", port, "-a", "secret", "-t", "ping,set,get,mset", "-n", "300", "-c", "4", "-q"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        for name in ("PING_INLINE", "PING_MBULK", "SET", "GET", "MSET"):
            assert f"{name}" in done.stdout
        assert "rror" not in done.stdout + done.stderr


@dataclass
class Value:
    """What a Redis would have."""

    data: bytes
    expiry_ms: int | None = field(default=None)


class RedisMachine(RuleBasedStateMachine):
    """Random commands against a dictionary, by a clock that is turned by hand."""

    names = st.sampled_from(["a", "b", "n:a", "n:b"])
    values = st.binary(max_size=20)
    times = st.integers(1, 50)

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, Value] = {}
        self.now_ms = 10**12
        self.context = server(MIB, resp_port=0)
        self.running = self.context.__enter__()
        self.running.cache.memory.wall_ns = lambda: self.now_ms * 1_000_000
        self.db = Redis(port=self.running.resp_port or 0, socket_timeout=20)

    def there(self, name: str) -> Value | None:
        value = self.model.get(name)
        if value is not None and value.expiry_ms is not None and value.expiry_ms <= self.now_ms:
            del self.model[name]
            return None
        return value

    @rule(name=names, data=values, condition=st.sampled_from(["", "nx", "xx"]), ttl=st.none() | times)
    def set(self, name: str, data: bytes, condition: str, ttl: int | None) -> None:
        options = {condition: True} if condition else {}
        done = self.db.set(name, data, px=ttl, **options)  # type: ignore[arg-type]
        allowed = not condition or (self.there(name) is None) == (condition == "nx")
        assert bool(done) == allowed
        if allowed:
            self.model[name] = Value(data, None if ttl is None else self.now_ms + ttl)

    @rule(name=names, ttl=times)
    def expire(self, name: str, ttl: int) -> None:
        value = self.there(name)
        assert self.db.pexpire(name, ttl) == (value is not None)
        if value is not None:
            value.expiry_ms = self.now_ms + ttl

    @rule(name=names)
    def persist(self, name: str) -> None:
        value = self.there(name)
        assert self.db.persist(name) == (value is not None and value.expiry_ms is not None)
        if value is not None:
            value.expiry_ms = None

    @rule(name=names)
    def delete(self, name: str) -> None:
        assert self.db.delete(name) == (self.there(name) is not None)
        self.model.pop(name, None)

    @precondition(lambda self: self.model)
    @rule(step=st.integers(1, 40))
    def wait(self, step: int) -> None:
        self.now_ms += step

    @invariant()
    def agrees(self) -> None:
        for name in ("a", "b", "n:a", "n:b"):
            value = self.there(name)
            assert self.db.get(name) == (None if value is None else value.data)
            left = -2 if value is None else -1 if value.expiry_ms is None else value.expiry_ms - self.now_ms
            assert self.db.pttl(name) == left
        assert sorted(self.db.scan_iter()) == sorted(name.encode() for name in list(self.model) if self.there(name))

    def teardown(self) -> None:
        assert self.running.cache.audit() == []
        self.db.close()
        self.context.__exit__(None, None, None)


TestRedisMachine = RedisMachine.TestCase
TestRedisMachine.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
