"""What clusters are built on: the same contract for etcd and for the registry in this process."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.etcd import Endpoint, Etcd, parse_endpoints
from cygnet.gcache.runtime.registry import MAX_DOCUMENT_BYTES, LocalRegistry, Registry, RegistryError
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd

WAIT_S = 60.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["local", pytest.param("etcd", marks=[needs_etcd, pytest.mark.slow])])
def registry(request: pytest.FixtureRequest) -> Iterator[Registry]:
    if request.param == "local":
        local = LocalRegistry()
        yield local
        assert local.audit() == []
        return
    cluster = request.getfixturevalue("etcd")
    yield cluster.registry(f"/test/{time.monotonic_ns()}/", try_timeout_s=10.0)


def test_writes_are_conditional(registry: Registry) -> None:
    assert registry.read().documents == {}
    assert registry.write("a", b"1", expected=0)
    assert not registry.write("a", b"2", expected=0)
    first = registry.read()
    revision = first.documents["a"].revision
    assert first.documents["a"].value == b"1"
    assert first.revision >= revision > 0
    assert registry.write("b/c", b"", expected=0)
    assert registry.write("a", b"\xff\x00", expected=revision)
    assert not registry.write("a", b"3", expected=revision)
    second = registry.read()
    assert second.revision > first.revision
    assert {key: document.value for key, document in second.documents.items()} == {"a": b"\xff\x00", "b/c": b""}
    assert not registry.remove("a", expected=revision)
    assert not registry.remove("a", expected=0)
    assert registry.remove("a", expected=second.documents["a"].revision)
    assert list(registry.read().documents) == ["b/c"]


def test_of_many_writers_one_wins(registry: Registry) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        if registry.write("view", b"%d" % number, expected=0):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(won) == 1
    assert registry.read().documents["view"].value == b"%d" % won[0]


def test_what_has_a_lease_goes_with_it(registry: Registry) -> None:
    short, long = registry.grant(2), registry.grant(60)
    assert short != long
    assert registry.write("short", b"", expected=0, lease=short)
    assert registry.write("long", b"", expected=0, lease=long)
    assert registry.refresh(short)
    before = registry.read()
    until = time.monotonic() + WAIT_S
    while "short" in registry.read().documents:
        assert time.monotonic() < until
        registry.wait(before.revision, 1.0)
    assert not registry.refresh(short)
    assert registry.refresh(long)
    with pytest.raises(RegistryError):
        registry.write("late", b"", expected=0, lease=short)
    registry.revoke(long)
    registry.revoke(long)
    assert registry.read().documents == {}


def test_waiting_ends_with_the_next_change_or_in_time(registry: Registry) -> None:
    assert registry.write("a", b"1", expected=0)
    now = registry.read()
    assert registry.wait(now.revision - 1, WAIT_S), "it has changed already"
    began = time.monotonic()
    assert not registry.wait(now.revision, 0.2)
    assert time.monotonic() - began < WAIT_S / 2
    woken = threading.Event()

    def wait() -> None:
        if registry.wait(now.revision, WAIT_S):
            woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert registry.write("b", b"1", expected=0)
    thread.join(WAIT_S)
    assert woken.is_set()


def test_documents_are_bounded(registry: Registry) -> None:
    with pytest.raises(RegistryError):
        registry.write("big", bytes(MAX_DOCUMENT_BYTES + 1), expected=0)


def test_leases_end_by_the_clock() -> None:
    now = [100.0]
    registry = LocalRegistry(lambda: now[0])
    lease = registry.grant(5)
    registry.write("a", b"", expected=0, lease=lease)
    now[0] += 4.9
    assert registry.refresh(lease)
    now[0] += 4.9
    assert "a" in registry.read().documents
    now[0] += 0.2
    assert registry.read().documents == {}
    assert registry.audit() == []


@needs_etcd
@pytest.mark.slow
def test_it_works_while_one_of_three_is_dead_or_frozen_and_says_so_when_two_are(etcd: EtcdCluster) -> None:
    registry = etcd.registry(f"/test/{time.monotonic_ns()}/", try_timeout_s=10.0)
    hasty = etcd.registry("/test/hasty/", try_timeout_s=0.3)

    def patiently(call: Callable[[], T]) -> T:
        """Until a new leader has been found."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return call()
            except RegistryError:
                assert time.monotonic() < until
                time.sleep(0.1)

    def count() -> int:
        return len(registry.read().documents)

    try:
        for number in range(3):
            etcd.kill(number)
            patiently(partial(registry.write, f"killed {number}", b"", expected=0))
            assert patiently(count) == 2 * number + 1
            etcd.heal()
            etcd.signal(number, signal.SIGSTOP)
            patiently(partial(registry.write, f"frozen {number}", b"", expected=0))
            assert patiently(count) == 2 * number + 2
            etcd.heal()
        etcd.signal(0, signal.SIGSTOP)
        etcd.signal(1, signal.SIGSTOP)
        until, problem = time.monotonic() + WAIT_S, ""
        while not problem:  # an answer may have been on its way
            assert time.monotonic() < until
            try:
                hasty.read()
            except RegistryError as error:
                problem = str(error)
        assert "can't be reached" in problem
        assert not hasty.wait(1, 0.2)
    finally:
        etcd.heal()
    assert patiently(count) == 6


class FakeGateway:
    """Answers each request with the next of these bytes, and notes what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._sock.getsockname()[1])
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._run, args=(answers,))
        self._thread.start()

    def _run(self, answers: tuple[bytes, ...]) -> None:
        for answer in answers:
            sock, _ = self._sock.accept()
            with sock:
                request = b""
                while not request.endswith(b"}"):
                    request += sock.recv(65536)
                self.requests.append(request)
                sock.sendall(answer)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._sock.close()


def answer(body: object, status: int = 200) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


def test_a_token_is_had_for_user_and_password_and_anew_when_it_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYGNET_ETCD_USER", "cygnet")
    monkeypatch.setenv("CYGNET_ETCD_PASSWORD", "secret")
    stale = answer({"error": "etcdserver: invalid auth token", "code": 16}, 401)
    read = answer({"header": {"revision": "7"}})
    gateway = FakeGateway(answer({"token": "one"}), read, stale, answer({"token": "two"}), read)
    etcd = Etcd((gateway.endpoint,), "/test/", try_timeout_s=WAIT_S)
    assert etcd.read().revision == 7
    assert etcd.read().documents == {}
    gateway.close()
    asked = [request.split(b" ", 2)[1] for request in gateway.requests]
    assert asked == [
        b"/v3/auth/authenticate",
        b"/v3/kv/range",
        b"/v3/kv/range",
        b"/v3/auth/authenticate",
        b"/v3/kv/range",
    ]
    assert b'"password": "secret"' in gateway.requests[0]
    assert [b"Authorization: one" in request for request in gateway.requests] == [False, True, True, False, False]
    assert b"Authorization: two" in gateway.requests[4]


@pytest.mark.parametrize(
    "reply",
    [answer(b"no json"), answer(b"[]"), answer({}), answer({"error": "sick"}, 503), b"HTTP/1.1 what\r\n\r\n", b""],
)
def test_an_endpoint_that_talks_nonsense_is_one_that_failed(reply: bytes) -> None:
    gateway = FakeGateway(reply)
    with pytest.raises(RegistryError):
        Etcd((gateway.endpoint,), "/test/", try_timeout_s=WAIT_S).read()
    gateway.close()


def test_endpoints_are_read_and_checked() -> None:
    assert parse_endpoints("http://a:1,b, https://[::1]:3") == (
        Endpoint("a", 1),
        Endpoint("b", 2379),
        Endpoint("::1", 3, tls=True),
    )
    for wrong in ("", "a,", "ftp://a", "a:0", "a:70000", "a/b"):
        with pytest.raises(ConfigError, match=r"etcd endpoint|2379"):
            parse_endpoints(wrong)
