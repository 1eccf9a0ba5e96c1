"""EngineCore against the dumbest oracle: every request's output is what the imagined model says after its tokens."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cygnet.base.errors import ContextLengthError, InvalidRequestError, InvariantError, QueueFullError, RequestError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import StepResult
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.sizing import PoolSizes, min_swa_blocks
from support.fake_runner import VOCAB, FakeRunner, next_token

SIZE = 4
WINDOW = 6
HYBRID = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(3, 1, 4, 4, 2, window=WINDOW))
FULL_ONLY = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(0, 0, 0, 0, 2))


class Bench:
    """A core, a fake runner and a clock; runs to the end and keeps what came out."""

    def __init__(
        self,
        geometry: KVGeometry = HYBRID,
        *,
        full_blocks: int = 64,
        swa_blocks: int = 32,
        max_model_len: int = 120,
        chunk: int = 16,
        seqs: int = 8,
        max_requests: int = 512,
        ageing: int = 1000,
        kv_policy: KVPolicy | None = None,
        share: bool = True,
        growth: int = 32,
    ) -> None:
        swa_blocks = swa_blocks if geometry.has_swa else 0
        policy = kv_policy or KVPolicy(track_freed=True)
        self.kv = KVManager(geometry, PoolSizes(SIZE, full_blocks, swa_blocks, max_model_len), policy)
        self.core = EngineCore(
            self.kv,
            SchedulerPolicy(seqs, chunk, ageing, share, growth),
            fingerprint="fake",
            eos_token_ids=[0],
            vocab_size=VOCAB,
            max_requests=max_requests,
        )
        self.runner = FakeRunner(geometry, SIZE)
        self.chunk = chunk
        self.now = 0
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.order: list[str] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **sampling: object) -> None:
        self.core.add(AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling)), self.now)
        self.tokens[name] = []

    def step(self) -> bool:
        self.now += 50_000_000
        plan = self.core.schedule(self.now)
        if plan is None:
            return False
        assert plan.num_tokens <= self.chunk
        self.order += [new.request_id for new in plan.new]
        self._take(self.core.apply(self.runner.execute(plan), self.now))
        assert self.core.audit() == []
        assert self.runner.wrong == []
        return True

    def abort(self, name: str) -> None:
        self._take(self.core.abort([name], self.now))

    def _take(self, outputs: list) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens[output.request_id] += output.token_ids
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("requests don't end")

    def assert_all_free(self) -> None:
        """Nothing is held but by the tree; and that is all free after a flush."""
        full, swa = self.kv.pool_stats()
        assert full.used == swa.used == 0
        self.kv.flush()
        assert self.kv.full_pool.num_free == self.kv.full_pool.num_blocks
        assert self.kv.swa_pool.num_free == self.kv.swa_pool.num_blocks


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


def prompt_of(rnd: Random, longest: int) -> list[int]:
    """Random tokens, often behind one of three shared beginnings."""
    length = rnd.randint(1, longest)
    shared = [[1] * longest, [2] * longest, list(range(1, longest + 1)), []][rnd.randrange(4)]
    kept = [t % VOCAB for t in shared[: rnd.randint(0, length)]]
    return kept + [rnd.randint(0, 3) for _ in range(length - len(kept))]


@pytest.mark.parametrize("geometry", [HYBRID, FULL_ONLY], ids=["hybrid", "full-only"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([4, 7, 16, 64]),
    seqs=st.integers(1, 8),
    extra_full=st.integers(0, 30),
    extra_swa=st.integers(0, 30),
    prefix_cache=st.booleans(),
    rebuild=st.booleans(),
    share=st.booleans(),
    growth=st.sampled_from([0, 0, 8, 32]),
)
def test_any_load_ends_with_right_tokens(
    geometry: KVGeometry,
    seed: int,
    chunk: int,
    seqs: int,
    extra_full: int,
    extra_swa: int,
    prefix_cache: bool,
    rebuild: bool,
    share: bool,
    growth: int,
) -> None:
    """From the smallest legal pools up: all requests end, with the right tokens, and nothing leaks."""
    rnd = Random(seed)
    longest = rnd.randint(24, 90)
    bench = Bench(
        geometry,
        full_blocks=-(-longest // SIZE) + extra_full,
        swa_blocks=min_swa_blocks(geometry, SIZE, min(chunk, longest)) + extra_swa,
        max_model_len=longest,
        chunk=chunk,
        seqs=seqs,
        share=share,
        growth=growth,
        kv_policy=KVPolicy(prefix_cache=prefix_cache, rebuild=rebuild, track_freed=True, seed=seed),
    )
    wanted: dict[str, list[int]] = {}
    for index in range(14):
        prompt, max_tokens = prompt_of(rnd, longest - 1), rnd.randint(1, 20)
        wanted[f"r{index}"] = expected(prompt, min(max_tokens, longest - len(prompt)))
        bench.add(f"r{index}", prompt, max_tokens)
        for _ in range(rnd.randint(0, 4)):
            bench.step()
        if rnd.random() < 0.2:
            bench.abort(f"r{rnd.randint(0, index)}")
        if rnd.random() < 0.1:
            bench.core.flush_cache()
    bench.run()
    assert bench.reasons.keys() == wanted.keys()
    for name, tokens in wanted.items():
        got = bench.tokens[name]
        assert got == tokens[: len(got)]
        assert bench.reasons[name] == "abort" or got == tokens
    bench.assert_all_free()


def test_second_run_computes_only_what_is_not_cached() -> None:
    bench = Bench()
    prompt = list(range(1, 43))
    bench.add("cold", prompt)
    bench.run()
    before = bench.runner.num_computed
    bench.add("warm", prompt)
    bench.run()
    assert bench.cached == {"cold": 0, "warm": 40}
    assert bench.tokens["warm"] == bench.tokens["cold"]
    assert bench.runner.num_computed - before == 2 + len(bench.tokens["warm"]) - 1


def test_next_turn_resumes_at_the_end_of_the_answer() -> None:
    bench = Bench()
    prompt = list(range(1, 30))
    bench.add("turn 1", prompt, 9, ignore_eos=True)
    bench.run()
    history = prompt + bench.tokens["turn 1"]
    bench.add("turn 2", [*history, 5, 6, 7])
    bench.run()
    assert bench.cached["turn 2"] == (len(history) - 1) // SIZE * SIZE


def test_lost_window_is_rebuilt_exactly_and_cheaply() -> None:
    """Full KV of 92 tokens, no window: replay R = 3 layers x 6 tokens before them, not 92."""
    bench = Bench(full_blocks=100, max_model_len=200)
    prompt = [1 + i % 40 for i in range(94)]
    bench.add("cold", prompt)
    bench.run()
    bench.kv.tree.evict_windows(bench.kv.tree.num_evictable_swa, bench.now)
    before = bench.runner.num_computed
    bench.add("rebuilt", prompt)
    bench.run()
    start = (92 - 3 * WINDOW) // SIZE * SIZE
    assert bench.cached["rebuilt"] == start
    assert bench.tokens["rebuilt"] == bench.tokens["cold"]
    stats = bench.core.stats()
    assert stats.rebuilt_tokens_total == 92 - start
    assert bench.runner.num_computed - before == 94 - start + len(bench.tokens["cold"]) - 1


def test_rebuild_one_block_short_would_be_wrong() -> None:
    """The oracle notices an inexact window: a replay one block too short gives another token."""
    bench = Bench(full_blocks=100, max_model_len=200)
    prompt = [1 + i % 40 for i in range(94)]
    bench.add("cold", prompt)
    bench.run()
    bench.kv.tree.evict_windows(bench.kv.tree.num_evictable_swa, bench.now)
    bench.kv.geometry = KVGeometry(HYBRID.full, GroupGeometry(2, 1, 4, 4, 2, window=WINDOW))
    bench.add("short", prompt)
    bench.run()
    assert bench.tokens["short"] != bench.tokens["cold"]


def test_preemption_keeps_what_was_computed() -> None:
    """Two requests that can't both finish in the pool: the younger is preempted and later resumes from the tree."""
    bench = Bench(full_blocks=28, max_model_len=80, seqs=2)
    bench.add("old", list(range(1, 30)), 40, ignore_eos=True)
    bench.step()
    bench.add("young", list(range(11, 35)), 40, ignore_eos=True)
    bench.run()
    assert bench.core.stats().preemptions_total >= 1
    assert bench.tokens["old"] == _no_eos(list(range(1, 30)), 40)
    assert bench.tokens["young"] == _no_eos(list(range(11, 35)), 40)
    # Undisturbed they compute 29 + 39 and 24 + 39 tokens. "young" stands near 53 when preempted, loses the end of that
    # to "old", and resumes from the rest.
    assert bench.runner.num_computed - (29 + 39 + 24 + 39) < 45


def _no_eos(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_concurrent_twins_compute_a_prefix_once() -> None:
    """Four requests with one prefix arrive together: one computes it, the others wait and branch off its window."""
    bench = Bench(full_blocks=200, swa_blocks=100, max_model_len=200, chunk=16)
    prefix = [1 + i % 40 for i in range(80)]
    for index in range(4):
        bench.add(f"r{index}", [*prefix, 41, 42 + index], 1)
    bench.run()
    assert bench.runner.num_computed == 82 + 3 * 2
    for index in range(4):
        assert bench.tokens[f"r{index}"] == expected([*prefix, 41, 42 + index], 1)


def test_fewest_uncached_first_and_no_starvation() -> None:
    bench = Bench(seqs=1, full_blocks=200, swa_blocks=40, max_model_len=200, ageing=100)
    bench.add("first", [1] * 30, 8, ignore_eos=True)
    bench.step()
    bench.add("long", [2] * 60, 1)
    bench.add("short", [3] * 8, 1)
    while "first" not in bench.reasons:
        bench.step()
    bench.step()
    assert bench.order[:2] == ["first", "short"]
    # A stream of short ones arrives for ever; each step is 50 ms, worth 5 tokens of ageing, so "long" gets its turn.
    for index in range(40):
        bench.add(f"s{index}", [4 + index] * 8, 1)
        bench.step()
        if "long" in bench.order:
            break
    assert "long" in bench.order


def test_arrival_by_another_clock_does_not_put_a_request_last_for_ever() -> None:
    bench = Bench(seqs=1, full_blocks=200, max_model_len=200)
    bench.core.add(AddRequest("wall clock", [1] * 8, SamplingParams(max_tokens=1), arrival_ns=1_700_000_000 * 10**9), 0)
    bench.tokens["wall clock"] = []
    for index in range(20):
        bench.add(f"s{index}", [4 + index] * 8, 1)
        bench.step()
    assert bench.order[0] == "wall clock"
    assert bench.core.stats().num_waiting < 20


def test_a_full_pool_admits_no_more_than_it_can_let_grow() -> None:
    """Long answers in a pool that holds a few of them: admitting to the last block would compute half of it twice."""
    bench = Bench(full_blocks=120, swa_blocks=400, max_model_len=200, seqs=16)
    rnd = Random(3)
    ideal = 0
    for index in range(40):
        prompt, answer = [rnd.randrange(1, VOCAB) for _ in range(rnd.randint(5, 60))], rnd.randint(40, 120)
        bench.add(f"r{index}", prompt, answer, ignore_eos=True)
        ideal += len(prompt) + answer - 1
    bench.run()
    assert bench.runner.num_computed < 1.15 * ideal


def test_key_is_renewed_when_the_cache_changes() -> None:
    """A waiting request whose prefix gets cached moves ahead of one with fewer, but uncached, tokens."""
    bench = Bench(seqs=1, full_blocks=200, swa_blocks=60, max_model_len=200, ageing=0, share=False)
    shared = [1 + i % 40 for i in range(60)]
    bench.add("maker", [*shared, 41], 1)
    bench.step()
    bench.add("uncached", [7] * 30, 1)
    bench.add("follower", [*shared, 42], 1)
    bench.run()
    assert bench.order == ["maker", "follower", "uncached"]


def test_prompt_longer_than_the_swa_pool() -> None:
    """A prompt of 40 windows in a SWA pool of one window + chunk + one block, whose use stays flat."""
    blocks = min_swa_blocks(HYBRID, SIZE, 16)
    bench = Bench(full_blocks=80, swa_blocks=blocks, max_model_len=300)
    bench.add("long", [1 + i % 40 for i in range(240)], 30, ignore_eos=True)
    used = []
    while bench.step():
        used.append(bench.kv.pool_stats()[1].used)
    assert bench.reasons["long"] == "length"
    assert max(used) <= -(-WINDOW // SIZE) + 1
    assert bench.tokens["long"] == _no_eos([1 + i % 40 for i in range(240)], 30)


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (AddRequest("x", [], SamplingParams()), InvalidRequestError, "empty"),
        (AddRequest("x", [1, VOCAB], SamplingParams()), InvalidRequestError, "between 0 and 49"),
        (AddRequest("x", [-1], SamplingParams()), InvalidRequestError, "between 0 and 49"),
        (AddRequest("x", [1] * 120, SamplingParams()), ContextLengthError, "120 tokens"),
        (AddRequest("x", [1], SamplingParams(top_p=0.0)), InvalidRequestError, "top_p"),
        (AddRequest("x", [1], SamplingParams(stop_token_ids=(3, VOCAB))), InvalidRequestError, "stop_token_ids"),
        (AddRequest("x", [1], SamplingParams(logit_bias={-1: 2.0})), InvalidRequestError, "logit_bias"),
        (AddRequest("taken", [1], SamplingParams()), InvalidRequestError, "in use"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(message: AddRequest, error: type, words: str) -> None:
    bench = Bench()
    bench.add("taken", [1, 2, 3])
    with pytest.raises(error, match=words) as caught:
        bench.core.add(message, 0)
    assert isinstance(caught.value, RequestError)
    assert caught.value.request_id == message.request_id
    assert bench.core.num_requests == 1
    assert bench.core.audit() == []


def test_queue_is_bounded() -> None:
    bench = Bench(max_requests=2)
    bench.add("a", [1])
    bench.add("b", [1])
    with pytest.raises(QueueFullError, match="2 requests"):
        bench.add("c", [1])


def test_answers_end_for_the_right_reason() -> None:
    bench = Bench(max_model_len=40)
    prompt = [3] * 10
    tokens = _no_eos(prompt, 30)
    stop = next(t for t in tokens if t != 0)
    bench.add("stop id", prompt, 20, stop_token_ids=(stop,), ignore_eos=True)
    bench.add("max_tokens", prompt, 3, ignore_eos=True)
    bench.add("context", prompt, 1000, ignore_eos=True)
    bench.add("min_tokens", prompt, 20, stop_token_ids=(stop,), ignore_eos=True, min_tokens=tokens.index(stop) + 2)
    bench.run()
    assert bench.reasons == {"stop id": "stop", "max_tokens": "length", "context": "length"} | {
        "min_tokens": bench.reasons["min_tokens"]
    }
    assert bench.tokens["stop id"] == tokens[: tokens.index(stop) + 1]
    assert len(bench.tokens["context"]) == 30
    assert len(bench.tokens["min_tokens"]) > tokens.index(stop) + 1


def test_results_must_follow_their_plan() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    plan = bench.core.schedule(1)
    assert plan is not None
    with pytest.raises(InvariantError, match="schedule called again"):
        bench.core.schedule(2)
    with pytest.raises(InvariantError, match="does not belong"):
        bench.core.apply(StepResult(plan.step + 1, {}), 2)


def test_abort_between_plan_and_result_is_survived() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    bench.add("b", [4, 5, 6], 2)
    plan = bench.core.schedule(1)
    assert plan is not None
    result = bench.runner.execute(plan)
    bench.abort("a")
    bench._take(bench.core.apply(result, 2))
    bench.run()
    assert bench.reasons["a"] == "abort"
    assert bench.tokens["a"] == []
    assert bench.tokens["b"] == expected([4, 5, 6], 2)
    bench.assert_all_free()


def test_tenants_do_not_share() -> None:
    bench = Bench()
    prompt = list(range(1, 40))
    for salt in ("a", "b", "a"):
        bench.core.add(AddRequest(f"{salt}{len(bench.tokens)}", prompt, SamplingParams(max_tokens=1), salt), bench.now)
        bench.tokens[f"{salt}{len(bench.tokens)}"] = []
        bench.run()
    assert bench.cached == {"a0": 0, "b1": 0, "a2": 36}
