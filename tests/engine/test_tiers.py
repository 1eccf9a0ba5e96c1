"""The engine over three tiers, with contents that are checked at every read: any load, any faults, right tokens."""

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cygnet.base.geometry import KVGeometry
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager, LowerTiers
from cygnet.kv.policy import KVPolicy, TierPolicy, WritePolicy
from cygnet.kv.sizing import HostSizes, PoolSizes, min_swa_blocks
from cygnet.kv.store import Group, namespace_of
from support.fake_runner import VOCAB, FakeRunner
from support.fake_store_worker import FakeStoreWorker

from .test_core import FULL_ONLY, HYBRID, SIZE, WINDOW, expected, prompt_of

MS = 1_000_000
THROUGH = TierPolicy(min_fetch_tokens=SIZE)


class TierBench:
    """A core over three tiers, with a fake runner and a fake store worker, in virtual time."""

    def __init__(
        self,
        geometry: KVGeometry = HYBRID,
        *,
        full_blocks: int = 30,
        swa_blocks: int = 14,
        host: tuple[int, int] | None = (200, 60),
        max_model_len: int = 100,
        chunk: int = 16,
        policy: TierPolicy = THROUGH,
        kv_policy: KVPolicy | None = None,
        store: bool = True,
        faults: float = 0.0,
        hang: float = 0.0,
        seed: int = 0,
        seqs: int = 8,
    ) -> None:
        self.geometry, self.chunk, self.seqs, self._policy = geometry, chunk, seqs, policy
        self._sizes = PoolSizes(SIZE, full_blocks, swa_blocks if geometry.has_swa else 0, max_model_len)
        self._host = HostSizes(SIZE, host[0], host[1] if geometry.has_swa else 0) if host else None
        self._kv_policy = kv_policy or KVPolicy(track_freed=True, seed=seed)
        self._namespace = namespace_of("fake", geometry, SIZE, "float32") if store else None
        self.random = Random(seed)
        self.now = 0
        self.worker = FakeStoreWorker({}, self.random, faults=faults, hang=hang)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.cached: dict[str, tuple[int, int, int]] = {}
        self.start()

    def start(self) -> None:
        """A new engine process: device and host are empty, the store is what it was."""
        lower = LowerTiers(self._host, self._policy, self._namespace) if self._host else None
        self.kv = KVManager(self.geometry, self._sizes, self._kv_policy, lower=lower)
        self.core = EngineCore(
            self.kv,
            SchedulerPolicy(self.seqs, self.chunk),
            fingerprint="fake",
            eos_token_ids=[0],
            vocab_size=VOCAB,
        )
        self.runner = FakeRunner(self.geometry, SIZE)
        objects = self.worker.objects
        self.worker = FakeStoreWorker(self.runner.host, self.random, faults=self.worker.faults, hang=self.worker.hang)
        self.worker.objects = objects

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **sampling: object) -> None:
        self.core.add(AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling)), self.now)
        self.tokens[name] = []

    def step(self, *, everything: bool = False) -> bool:
        """One turn of the loop; whether anything is left to do."""
        self.now += 20 * MS
        self.worker.submit(self.core.take_store_commands())
        self.core.store_results(self.worker.answers(everything=everything), self.now)
        plan = self.core.schedule(self.now)
        if plan is not None:
            self._take(self.core.apply(self.runner.execute(plan), self.now))
        assert self.core.audit() == []
        assert self.runner.wrong == []
        self.worker.submit(self.core.take_store_commands())
        return self.core.wants_step or not self.worker.idle

    def _take(self, outputs: list) -> None:
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            lower = output.num_host_tokens + output.num_store_tokens
            device = output.num_cached_tokens - lower
            self.cached[output.request_id] = (device, output.num_host_tokens, output.num_store_tokens)
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason

    def abort(self, name: str) -> None:
        self._take(self.core.abort([name], self.now))

    def run(self, limit: int = 5000, *, everything: bool = True) -> None:
        for _ in range(limit):
            if not self.step(everything=everything):
                return
        raise AssertionError("requests don't end")

    def ask(self, name: str, prompt: list[int], max_tokens: int = 4) -> tuple[int, int, int]:
        """Run one request alone and check its tokens; tokens it got from device, host and store."""
        self.add(name, prompt, max_tokens)
        self.run()
        assert self.tokens[name] == expected(prompt, max_tokens)
        return self.cached[name]

    def crowd_out(self, device_only: bool = True) -> None:
        """Fill the device with other sequences."""
        for index in range(4):
            self.ask(f"crowd {self.now} {index}", [10 + index] * 90)

    def assert_all_free(self) -> None:
        full, swa = self.kv.pool_stats()
        assert full.used == swa.used == 0
        self.kv.flush()
        assert self.kv.host is not None
        for pool in (self.kv.full_pool, self.kv.swa_pool, self.kv.host.full_pool, self.kv.host.swa_pool):
            assert pool.num_free == pool.num_blocks, pool.name


@pytest.mark.parametrize("geometry", [HYBRID, FULL_ONLY], ids=["hybrid", "full-only"])
@settings(
    max_examples=150,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([4, 16, 64]),
    seqs=st.integers(1, 6),
    extra_full=st.integers(0, 20),
    extra_swa=st.integers(0, 20),
    host_full=st.integers(4, 80),
    host_swa=st.integers(3, 40),
    rebuild=st.booleans(),
    write=st.sampled_from(["through", "selective", "back"]),
    wait=st.sampled_from(["timeout", "wait", "best_effort"]),
    faults=st.sampled_from([0.0, 0.1, 0.9]),
    hang=st.sampled_from([0.0, 0.8]),
    puts=st.sampled_from([3, 4096]),
    keep_alive_ms=st.sampled_from([0, 100, 1_000_000]),
)
def test_any_load_over_three_tiers_ends_with_right_tokens(
    geometry: KVGeometry,
    seed: int,
    chunk: int,
    seqs: int,
    extra_full: int,
    extra_swa: int,
    host_full: int,
    host_swa: int,
    rebuild: bool,
    write: WritePolicy,
    wait: str,
    faults: float,
    hang: float,
    puts: int,
    keep_alive_ms: int,
) -> None:
    rnd = Random(seed)
    longest = rnd.randint(24, 80)
    bench = TierBench(
        geometry,
        full_blocks=-(-longest // SIZE) + extra_full,
        swa_blocks=min_swa_blocks(geometry, SIZE, min(chunk, longest)) + extra_swa,
        host=(host_full, host_swa),
        max_model_len=longest,
        chunk=chunk,
        seqs=seqs,
        kv_policy=KVPolicy(rebuild=rebuild, track_freed=True, seed=seed),
        policy=TierPolicy(
            write=write,
            wait=wait,  # type: ignore[arg-type]
            timeout_ns=100 * MS,
            timeout_ns_per_ki_token=100 * MS,
            min_fetch_tokens=SIZE,
            max_put_objects=puts,
            keep_alive_ns=keep_alive_ms * MS,
        ),
        faults=faults,
        hang=hang,
        seed=seed,
    )
    wanted: dict[str, list[int]] = {}
    for index in range(16):
        prompt, max_tokens = prompt_of(rnd, longest - 1), rnd.randint(1, 20)
        wanted[f"r{index}"] = expected(prompt, min(max_tokens, longest - len(prompt)))
        bench.add(f"r{index}", prompt, max_tokens)
        for _ in range(rnd.randint(0, 5)):
            bench.step()
        if rnd.random() < 0.2:
            bench.abort(f"r{rnd.randint(0, index)}")
        if rnd.random() < 0.1:
            bench.core.flush_cache(store=rnd.random() < 0.5)
        if rnd.random() < 0.1 and not bench.core.num_requests:
            bench.start()
    bench.run(everything=False)
    bench.run(everything=True)
    assert bench.reasons.keys() == wanted.keys()
    for name, tokens in wanted.items():
        got = bench.tokens[name]
        assert got == tokens[: len(got)]
        assert bench.reasons[name] == "abort" or got == tokens
    bench.assert_all_free()


PROMPT = [1 + i % 9 for i in range(62)]
"""15 whole blocks, of which the last token's is never reused."""


@pytest.mark.parametrize("write", ["through", "back"])
def test_from_the_host_after_the_device_lost_it(write: WritePolicy) -> None:
    bench = TierBench(store=False, policy=TierPolicy(write=write))
    bench.ask("cold", PROMPT)
    bench.crowd_out()
    device, host, store = bench.ask("warm", PROMPT)
    assert device + host == 60
    assert host > 0 == store


def test_selective_keeps_in_the_host_what_was_reused() -> None:
    bench = TierBench(store=False, policy=TierPolicy(write="selective"))
    bench.ask("once", PROMPT)
    assert len(bench.kv.host.tree) == 0
    bench.ask("twice", PROMPT)
    assert len(bench.kv.host.tree) == 15
    bench.crowd_out()
    device, host, _ = bench.ask("thrice", PROMPT)
    assert device + host == 60
    assert len(bench.kv.host.tree) == 15


def test_from_the_store_after_a_restart() -> None:
    bench = TierBench()
    bench.ask("cold", PROMPT)
    bench.start()
    assert bench.ask("restarted", PROMPT) == (0, 0, 60)
    assert bench.ask("again", PROMPT) == (60, 0, 0)


def test_only_the_window_that_is_used_comes_from_the_store() -> None:
    """60 tokens of full KV, and one window of SWA KV, not all 15 blocks."""
    bench = TierBench()
    bench.ask("cold", PROMPT)
    bench.start()
    bench.ask("restarted", PROMPT)
    assert bench.kv.store.reads.fetched_objects_total == 15 + -(-WINDOW // SIZE)


def test_a_window_lost_in_the_store_does_not_cost_the_full_kv() -> None:
    """Without its SWA objects the store's full KV is fetched all the same, and the window rebuilt."""
    bench = TierBench(full_blocks=60, max_model_len=200)
    prompt = [1 + i % 9 for i in range(150)]
    bench.ask("cold", prompt)
    bench.start()
    for key in [key for key in bench.worker.objects if key[16] == Group.SWA]:
        del bench.worker.objects[key]
    _, _, store = bench.ask("rebuilt", prompt)
    assert store == 148 - 3 * WINDOW - 2  # R, and then to a whole block
    assert bench.core.stats().rebuilt_tokens_total > 0


def test_a_hole_in_the_store_clips_to_the_best_boundary_before_it() -> None:
    bench = TierBench(full_blocks=60, max_model_len=200)
    prompt = [1 + i % 9 for i in range(150)]
    bench.ask("cold", prompt)
    keys = bench.core.prepare(AddRequest("k", prompt, SamplingParams())).kv.keys
    bench.start()
    hole = next(key for key in bench.worker.objects if key[16] == Group.FULL and key[17:] == keys[20])
    del bench.worker.objects[hole]
    _, _, store = bench.ask("clipped", prompt)
    assert 0 < store <= 20 * SIZE


def test_a_store_that_hangs_costs_its_timeout_and_no_more() -> None:
    bench = TierBench(policy=TierPolicy(timeout_ns=100 * MS, timeout_ns_per_ki_token=0, min_fetch_tokens=SIZE))
    bench.ask("cold", PROMPT)
    bench.start()
    bench.worker.hang = 1.0
    began = bench.now
    bench.add("late", PROMPT)
    while "late" not in bench.reasons:
        bench.step()
    assert bench.cached["late"] == (0, 0, 0)
    assert bench.tokens["late"] == expected(PROMPT, 4)
    assert bench.now - began < 500 * MS
    bench.run()
    assert bench.kv.store.reads.timeouts_total == 1


def test_requests_for_one_prefix_fetch_it_once() -> None:
    bench = TierBench()
    bench.ask("cold", PROMPT)
    bench.start()
    for index in range(4):
        bench.add(f"twin {index}", PROMPT)
    bench.run()
    assert bench.kv.store.reads.fetched_objects_total == 15 + -(-WINDOW // SIZE)
    assert all(sum(bench.cached[f"twin {index}"]) == 60 for index in range(4))


def test_what_the_store_lost_is_put_again_when_it_is_used() -> None:
    """A prefix that is hot on the device does not starve in the store."""
    bench = TierBench(policy=TierPolicy(keep_alive_ns=1000 * MS))
    bench.ask("cold", PROMPT)
    bench.worker.objects.clear()
    bench.ask("at once", PROMPT)
    count = len(bench.worker.objects)
    bench.now += 2000 * MS
    bench.ask("later", PROMPT)
    assert count < 15 <= len(bench.worker.objects)


def test_host_that_lost_a_prefix_is_mended_from_the_device() -> None:
    bench = TierBench(store=False, full_blocks=60)
    bench.ask("cold", PROMPT)
    bench.kv.host.flush()
    bench.ask("warm", PROMPT)
    assert len(bench.kv.host.tree) >= 15
    assert bench.kv.host.tree.num_checkpoints > 0


def test_flush_of_the_store_forgets_it() -> None:
    bench = TierBench()
    bench.ask("cold", PROMPT)
    bench.core.flush_cache(store=True)
    bench.run()
    assert bench.worker.objects == {}
    assert bench.ask("cold again", PROMPT) == (0, 0, 0)


def test_tenants_share_nothing_in_any_tier() -> None:
    bench = TierBench()
    bench.ask("one", PROMPT)
    bench.core.add(AddRequest("two", PROMPT, SamplingParams(max_tokens=2), cache_salt="other"), bench.now)
    bench.tokens["two"] = []
    bench.run()
    assert bench.cached["two"] == (0, 0, 0)
