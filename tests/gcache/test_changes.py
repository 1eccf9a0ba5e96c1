"""Pushes that land late: what was deleted or replaced meanwhile does not come back."""

import socket
import time
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cygnet.gcache.changes import Changes
from cygnet.gcache.protocol import (
    KEEP,
    NOT_DONE,
    Item,
    Op,
    Put,
    pack_keys,
    pack_number,
    pack_puts,
    pack_request,
    unpack_number,
)
from cygnet.gcache.record import checksums, num_chunks, pack_sums
from cygnet.kv.store import Outcome
from support.gcache import answer, client, key, raw, server

MOST = 4
keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


class Noting(RuleBasedStateMachine):
    """Against all that ever happened, in order: nothing late lands, and what is in time does while notes go back."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = Changes(MOST)
        self.happened: list[bytes | None] = []
        """`None`: everything was removed, or nothing moves any more."""
        self.tickets: list[tuple[int, int]] = []
        """Tickets, and how much had happened by then."""

    @rule()
    def give(self) -> None:
        self.tickets.append((self.subject.ticket(), len(self.happened)))

    @rule(name=keys)
    def change(self, name: bytes) -> None:
        self.subject.note(name)
        self.happened.append(name)

    @rule()
    def clear(self) -> None:
        self.subject.note_all()
        self.happened.append(None)

    @rule()
    def settle(self) -> None:
        self.subject.disarm()
        self.happened.append(None)

    @invariant()
    def judges(self) -> None:
        assert self.subject.audit() == []
        for ticket, at in self.tickets:
            since = self.happened[at:]
            for name in (b"a", b"f"):
                allowed = self.subject.allows(name, ticket)
                if None in since or name in since:
                    assert not allowed, "it has come late"
                elif len(since) <= MOST:
                    assert allowed, "it is in time"
        assert not self.subject.allows(b"a", 0)


TestNoting = Noting.TestCase
TestNoting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_another_process_knows_no_ticket_of_this_one() -> None:
    first, second = Changes(), Changes()
    ticket = first.ticket()
    second.ticket()
    assert first.allows(b"a", ticket)
    assert not second.allows(b"a", ticket)


def ask_for_ticket(sock: socket.socket) -> int:
    sock.sendall(pack_request(Op.TICKET, 1))
    return unpack_number(answer(sock)[1])[0]


def test_a_push_that_lands_late_does_not_bring_back_what_was_deleted_replaced_or_cleared() -> None:
    """Its old owner has given it up; the new one was frozen, or the network held it back."""
    with server() as running, raw(running) as sock, client(running.port) as sdk:

        def begin(name: object, value: bytes, ticket: int) -> bytes:
            """Send the head of a push; returns what is to follow."""
            put = Put(key(name), len(value), pack_sums(checksums(key(name), value)), 0, num_chunks(len(value)))
            meta = pack_number(ticket) + pack_puts([put])
            used = running.cache.arena.used_bytes
            sock.sendall(pack_request(Op.PUT, 1, meta, count=1, flags=KEEP, body_bytes=len(value)))
            until = time.monotonic() + 60.0
            while running.cache.arena.used_bytes == used and time.monotonic() < until:
                time.sleep(0.005)  # its room is taken when the head has been read
            return value

        def land(name: object, change: Callable[[], object], *, ticket: int | None = None) -> int:
            rest = begin(name, b"old" * 1000, ask_for_ticket(sock) if ticket is None else ticket)
            change()
            sock.sendall(rest)
            return answer(sock)[1][0]

        assert land("quiet", lambda: None) == Item.OK
        assert land("deleted", lambda: sdk.remove([key("deleted")])) == Item.FAILED
        assert land("cleared", lambda: sdk.clear(b"test")) == Item.FAILED
        assert land("elsewhere", lambda: sdk.remove([key("another")])) == Item.OK

        def replace_and_evict() -> None:
            assert sdk.put(key("replaced"), b"newer") is Outcome.OK
            cache = running.cache
            with cache.memory.lock:
                entry = cache.arena.find(key("replaced"))
                assert entry is not None
                cache.memory.forget(entry)

        assert land("replaced", replace_and_evict) == Item.FAILED
        early = ask_for_ticket(sock)
        running.cache.memory.end_tickets()
        assert land("settled", lambda: None, ticket=early) == Item.FAILED
        assert land("nobody's", lambda: None, ticket=7) == Item.FAILED
        there = ["quiet", "deleted", "cleared", "elsewhere", "replaced", "settled", "nobody's"]
        assert sdk.batch_exists([key(name) for name in there]) == [False, False, False, True, False, False, False]
        assert sdk.audit() == []


def test_a_delete_that_has_to_wait_too_long_says_that_nothing_was_done() -> None:
    with server() as running, client(running.port) as sdk:
        assert sdk.put(key(1), b"value") is Outcome.OK
        held = running.cache.begin_move(key(1), time.monotonic() + 5.0)
        with raw(running) as sock:
            sock.sendall(pack_request(Op.DELETE, 1, pack_keys([key(1), key(2)]), count=2, budget_ms=50))
            assert answer(sock)[1] == bytes([NOT_DONE, 0])
        assert sdk.try_remove([key(2)]) == [False]
        running.cache.end_move(key(1), held, gone=False)  # type: ignore[arg-type]
        assert sdk.get(key(1)) == b"value"
        assert sdk.try_remove([key(1)]) == [True]
