"""Probes and the circuit breaker; API key limits; slots; leases."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cygnet.router.health import HealthSettings, WorkerHealth
from cygnet.router.ledger import Ledger
from cygnet.router.limits import KeyLimits, key_digest
from cygnet.router.slots import MAX_SLOTS, SlotTable
from cygnet.router.view import WorkerRecord

S = 1_000_000_000


def up() -> WorkerHealth:
    health = WorkerHealth(HealthSettings())
    assert health.probed(True)
    return health


def test_a_worker_starts_with_its_first_good_probe() -> None:
    health = WorkerHealth(HealthSettings())
    assert not health.available(0)
    assert not health.probed(False)
    assert not health.available(0)
    assert health.probed(True)
    assert health.available(0)


def test_probes_must_fail_and_succeed_in_a_row() -> None:
    health = up()
    for ok in (False, False, True, False, False):
        assert not health.probed(ok)
    assert health.available(0)
    assert health.probed(False)
    assert not health.available(0)
    assert not health.probed(True)
    assert health.probed(True)
    assert health.available(0)


def test_a_4xx_never_opens_the_breaker() -> None:
    health = up()
    for _ in range(1000):
        health.refused()
    assert health.available(0)


def test_a_4xx_does_not_hide_failures() -> None:
    health = up()
    for _ in range(4):
        health.failed(0)
        health.refused()
    assert health.failed(0), "the fifth failure without a success between opens"


def test_breaker_opens_tries_one_and_closes() -> None:
    health = up()
    opened = [health.failed(0) for _ in range(5)]
    assert opened == [False] * 4 + [True]
    assert not health.available(5 * S - 1)
    assert health.available(5 * S)
    health.sent(5 * S)
    assert not health.available(5 * S), "one trial at a time"
    health.succeeded()
    assert health.circuit == "closed"
    assert health.available(5 * S)


def test_a_failed_trial_waits_twice_as_long_up_to_the_limit() -> None:
    health = up()
    for _ in range(5):
        health.failed(0)
    now, waits = 0, []
    for _ in range(6):
        before = now
        while not health.available(now):
            now += S
        waits.append((now - before) // S)
        health.sent(now)
        assert health.failed(now)
    assert waits == [5, 10, 20, 40, 60, 60]


def test_a_trial_that_is_cancelled_or_forgotten_frees_the_place() -> None:
    health = up()
    for _ in range(5):
        health.failed(0)
    assert health.available(5 * S)
    health.sent(5 * S)
    health.refused()
    assert health.available(5 * S)
    health.sent(5 * S)
    assert health.available(65 * S)


class HealthMachine(RuleBasedStateMachine):
    """Whatever happens, a worker that answers again is used again."""

    @initialize()
    def start(self) -> None:
        self.health = WorkerHealth(HealthSettings())
        self.now = 0

    @rule(ok=st.booleans())
    def probe(self, ok: bool) -> None:
        self.health.probed(ok)

    @rule(end=st.sampled_from(["succeeded", "refused", "failed", "forgotten"]))
    def request(self, end: str) -> None:
        if self.health.available(self.now):
            self.health.sent(self.now)
            if end == "failed":
                self.health.failed(self.now)
            elif end != "forgotten":
                getattr(self.health, end)()

    @rule(by=st.integers(0, 100))
    def time_passes(self, by: int) -> None:
        self.now += by * S

    @rule()
    def recovers(self) -> None:
        self.health.probed(True)
        self.health.probed(True)
        self.now += 61 * S
        assert self.health.available(self.now)
        self.health.sent(self.now)
        self.health.succeeded()
        assert self.health.available(self.now)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "health"):
            assert self.health.audit() == []


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=60, deadline=None)


def test_key_limits() -> None:
    alice, bob = key_digest("alice"), key_digest("bob")
    limits = KeyLimits(frozenset({alice, bob}), max_in_flight=2, per_minute=60)
    assert alice in limits
    assert key_digest("mallory") not in limits
    assert [limits.begin(alice, 0) for _ in range(3)] == [0, 0, 1]
    assert limits.begin(bob, 0) == 0, "one caller's limit is not another's"
    limits.end(alice)
    assert limits.begin(alice, 0) == 0
    assert limits.audit() == []


def test_key_rate_refills() -> None:
    alice = key_digest("alice")
    limits = KeyLimits(frozenset({alice}), max_in_flight=0, per_minute=2)
    assert [limits.begin(alice, 0) for _ in range(2)] == [0, 0]
    assert limits.begin(alice, 10 * S) == 20
    assert limits.begin(alice, 30 * S) == 0
    assert limits.begin(alice, 10_000 * S) == 0
    assert limits.audit() == []


def record(name: str) -> WorkerRecord:
    return WorkerRecord(url=f"http://{name}:1")


def test_slots_are_not_given_away_while_the_index_may_name_them() -> None:
    table = SlotTable(quarantine=100)
    assert [table.join(record(name), 0) for name in "abc"] == [0, 1, 2]
    assert table.join(record("a"), 0) == 0
    assert table.leave("http://b:1", 10) == 1
    assert table.leave("http://b:1", 10) is None
    assert table.join(record("d"), 109) == 3
    assert table.join(record("e"), 110) == 1
    assert table.live == 0b1111
    assert table.audit() == []


def test_a_restart_moves_a_worker_once() -> None:
    """Two routers notice the same restart; the second changes nothing."""
    table = SlotTable(quarantine=100)
    table.join(record("a"), 0)
    assert table.restart("http://a:1", 0, 5) == 1
    version = table.roster.version
    assert table.restart("http://a:1", 0, 5) == 1
    assert table.roster.version == version
    assert table.restart("http://nobody:1", 0, 5) is None


def test_slots_run_out_as_a_value() -> None:
    table = SlotTable(quarantine=10**9)
    for place in range(MAX_SLOTS):
        assert table.join(record(f"w{place}"), 0) == place
    assert table.join(record("more"), 0) is None
    assert table.audit() == []


def test_roster_versions_and_expiry() -> None:
    table = SlotTable(quarantine=10)
    table.join(WorkerRecord(url="http://a:1", expires_at=1000), 0)
    table.join(record("b"), 0)
    before = table.roster.version
    table.join(WorkerRecord(url="http://b:1", draining=True), 0)
    assert table.roster.version == before + 1
    assert table.roster.workers[1].draining
    assert list(table.expired(999)) == []
    assert list(table.expired(1000)) == ["http://a:1"]


class LedgerMachine(RuleBasedStateMachine):
    """Leases against a dict; loads are exactly zero when all has ended."""

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.model: dict[str, tuple[int, int, int]] = {}
        self.now = 0

    @rule(name=st.sampled_from("abcdef"), slot=st.integers(0, 2), cost=st.integers(1, 50), life=st.integers(1, 20))
    def hold(self, name: str, slot: int, cost: int, life: int) -> None:
        self.ledger.hold(name, slot, cost, self.now + life)
        self.model[name] = (slot, cost, self.now + life)

    @rule(name=st.sampled_from("abcdef"))
    def release(self, name: str) -> None:
        assert self.ledger.release(name) == (self.model.pop(name, None) is not None)

    @rule(name=st.sampled_from("abcdef"), cost=st.integers(1, 50))
    def settle(self, name: str, cost: int) -> None:
        assert self.ledger.settle(name, cost) == (name in self.model)
        if name in self.model:
            slot, _, expiry = self.model[name]
            self.model[name] = (slot, cost, expiry)

    @rule(by=st.integers(0, 10))
    def time_passes(self, by: int) -> None:
        self.now += by
        while self.ledger.reap(self.now):
            pass
        self.model = {name: held for name, held in self.model.items() if held[2] > self.now}

    @rule(slot=st.integers(0, 2))
    def drop(self, slot: int) -> None:
        self.ledger.drop(slot)
        self.model = {name: held for name, held in self.model.items() if held[0] != slot}

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.audit() == []
            assert len(self.ledger) == len(self.model)
            for slot in range(3):
                assert self.ledger.load(slot) == sum(cost for s, cost, _ in self.model.values() if s == slot)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, deadline=None)


def test_expiries_stay_small_under_renewal() -> None:
    ledger = Ledger()
    for turn in range(10_000):
        ledger.hold("a", 0, 1, turn + 100)
    assert len(ledger._expiries) < 200
    ledger.release("a")
    assert ledger.loads() == {}
