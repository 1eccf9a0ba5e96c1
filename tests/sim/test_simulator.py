"""Simulations whose outcome is known: by hand, by queueing theory, by an infinite cache, by a live engine."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cygnet.base.errors import InvariantError
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.cli.bench.traces import load_trace
from cygnet.cli.bench.workload import TokenSource
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import StepPlan
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager, KVPolicy
from cygnet.kv.sizing import PoolSizes
from cygnet.sim.assembly import Simulation, build
from cygnet.sim.cost import CostModel, LinearCost
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.model_config import facts_from_config
from cygnet.sim.model_table import model_facts
from cygnet.sim.scenario import Scenario, parse_scenario
from cygnet.sim.sessions import Piece, Session, Turn, random_sessions, with_poisson_arrivals
from support.paced import Clock, PacedRunner

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
MS = 1_000_000
FACTS = model_facts("gemma-3-270m")
ROOMY = PoolSizes(16, 200_000, 200_000, 100_000)


def simulation(text: str = "", *, cost: CostModel, sizes: PoolSizes = ROOMY, **more: Any) -> Simulation:
    return build(parse_scenario(text, "test"), FACTS, cost=cost, sizes=sizes, **more)


def request(name: str, at_ms: float, prompt: int, output: int) -> Session:
    return Session((Turn(pieces=(Piece(name, prompt),), output_len=output),), arrival_s=at_ms / 1e3)


# --- the event loop


def test_events_of_one_instant_have_an_order() -> None:
    loop, seen = EventLoop(), []

    def note(name: str) -> Callable[[int], None]:
        return lambda now_ns: seen.append((now_ns, name))

    loop.at(5, Priority.STEP_START, note("start"))
    loop.at(5, Priority.TURN, note("turn"))
    loop.at(5, Priority.SESSION, note("first"))
    loop.at(5, Priority.SESSION, note("second"))
    loop.at(5, Priority.STEP_END, note("end"))
    loop.at(3, Priority.STEP_START, note("early"))
    loop.run()
    assert seen[0] == (3, "early")
    assert [name for _, name in seen] == ["early", "end", "first", "second", "turn", "start"]
    with pytest.raises(InvariantError, match="at 5 ns"):
        loop.at(4, Priority.TURN, note("late"))


# --- known results


def test_a_schedule_of_two_workers_by_hand() -> None:
    """A step takes 10 ms and 1 ms per token; at most 16 tokens a step.

    worker 0   0-18 r0 8 | 18-41 r0 1, r2 12 | 41-67 r4 16 | 67-81 r4 4
    worker 1   0-14 r1 4 | 14-28 r3 4 | 28-39 r3 1
    """
    run = simulation(
        '[fleet]\nworkers = 2\ndispatch = "round_robin"\n[engine]\nmax_num_batched_tokens = 16\n',
        cost=LinearCost(10 * MS, MS),
        sizes=replace(ROOMY, block_size=4),
    )
    results = run.run(
        [request("r0", 0, 8, 2), request("r1", 0, 4, 1), request("r2", 5, 12, 1), request("r3", 5, 4, 2),
         request("r4", 20, 20, 1)]
    )  # fmt: skip
    columns = run.recorder.columns()
    rows = sorted(
        (int(a) // MS, int(f) // MS, int(e) // MS)
        for a, f, e in zip(columns["arrival_ns"], columns["first_ns"], columns["end_ns"], strict=True)
    )
    assert rows == [(0, 14, 14), (0, 18, 41), (5, 28, 39), (5, 41, 41), (20, 81, 81)]
    assert results.duration_s == 0.081
    assert results.steps == 7
    assert results.busy_share == pytest.approx((81 + 39) / (2 * 81))
    assert run.cluster.audit() == []


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_queue_with_fixed_service_times(load: float) -> None:
    """M/D/1: the mean wait is load x service / (2 (1 - load)). One request a step, met to 5 %."""
    service_ms = 10.0
    sessions = [request(f"r{i}", 0, 16, 1) for i in range(20_000)]
    run = simulation("[engine]\nmax_num_seqs = 1\n", cost=LinearCost(int(service_ms * MS)))
    results = run.run(with_poisson_arrivals(sessions, load / (service_ms / 1e3), seed=1))
    assert results.finished == 20_000
    assert results.queue_ms is not None
    assert results.ttft_ms is not None
    expected = load * service_ms / (2 * (1 - load))
    assert results.queue_ms.mean == pytest.approx(expected, rel=0.05)
    assert results.ttft_ms.mean == pytest.approx(expected + service_ms, rel=0.03)
    assert results.busy_share == pytest.approx(load, rel=0.03)


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces")
@pytest.mark.slow
def test_an_infinite_cache_has_the_traces_own_hit_rate() -> None:
    """Mooncake's conversation trace: 37.4 % of its tokens come again. In blocks of 512 the last token's one is never
    looked up, and requests one after another find all that was there."""
    sessions = load_trace(TRACES / "mooncake" / "conversation_trace.jsonl.gz", None)
    # One token a request, one request at a time, so that none misses what another is computing.
    alone = [Session((replace(s.turns[0], output_len=1),), arrival_s=float(index)) for index, s in enumerate(sessions)]
    run = simulation(
        "[kv]\nblock_size = 512\n[engine]\nmax_num_batched_tokens = 1000000\n",
        cost=LinearCost(MS),
        sizes=PoolSizes(512, 400_000, 400_000, 200_000),
    )
    results = run.run(alone)
    assert results.finished == len(sessions)
    assert results.full_hit == pytest.approx(0.374, abs=0.005)
    assert results.evicted_full_blocks == 0


def test_a_session_finds_what_it_said_before() -> None:
    """Ten turns of 64 new and 32 generated tokens: each prompt but the first finds all whole blocks of what was."""
    (session,) = random_sessions(num_sessions=1, turns=10, input_len=64, output_len=32, shared_prefix_len=0)
    run = simulation("[kv]\nblock_size = 16\n", cost=LinearCost(MS))
    results = run.run([session])
    assert results.finished == 10
    columns = run.recorder.columns()
    assert columns["prompt_tokens"].tolist() == [64 + 96 * turn for turn in range(10)]
    # The answer's last token is never computed, so the block that it ends is not cached.
    assert columns["cached_tokens"].tolist() == [0] + [96 * turn - 16 for turn in range(1, 10)]


# --- goals, refusals, the same again


def test_goodput_counts_what_met_all_goals() -> None:
    run = simulation("[goals]\nttft_ms = 18\ntpot_ms = 11\n[engine]\nmax_num_seqs = 1\n", cost=LinearCost(10 * MS, MS))
    # 18 ms to the first token, 11 ms a token: good. The second one waits 40 ms for its turn.
    results = run.run([request("r0", 0, 8, 3), request("r1", 0, 8, 3)])
    assert (results.good_share, results.duration_s) == (0.5, 0.08)
    assert results.goodput == pytest.approx(1 / 0.08)


def test_what_can_not_be_served_is_counted() -> None:
    sizes = replace(ROOMY, max_model_len=100)
    run = simulation("[engine]\nmax_num_seqs = 1\nmax_waiting = 1\n", cost=LinearCost(MS), sizes=sizes)
    sessions = [request("long", 0, 100, 1), *(request(f"r{i}", 0, 16, 4) for i in range(5))]
    results = run.run(sessions)
    assert results.refused == {"too long": 1, "queue full": 3}
    assert results.finished == 2
    assert run.cluster.audit() == []


MIX = random_sessions(num_sessions=40, turns=3, input_len=70, output_len=9, shared_prefix_len=200)


def test_the_same_seed_gives_the_same_results() -> None:
    def outcome(seed: int) -> Any:
        run = simulation(
            f"seed = {seed}\n[fleet]\nworkers = 3\n",
            cost=LinearCost(MS, MS // 100),
            sizes=PoolSizes(16, 90, 60, 2000),
        )
        return run.run(with_poisson_arrivals(MIX, 50.0, seed=0)), run.recorder.columns()["end_ns"].tolist()

    assert outcome(1) == outcome(1)


def test_bookkeeping_holds_at_every_step() -> None:
    """Small pools: evictions and preemptions happen."""
    faults: list[str] = []

    def check(plan: StepPlan, now_ns: int) -> None:
        for worker in run.cluster.workers:
            faults.extend(worker.core.kv.audit())

    run = simulation("[fleet]\nworkers = 2\n", cost=LinearCost(MS), sizes=PoolSizes(16, 60, 70, 900), watch=check)
    results = run.run(with_poisson_arrivals(MIX, 2000.0, seed=0))
    assert faults == []
    assert results.finished == 120
    assert results.evicted_full_blocks > 0
    assert run.cluster.audit() == []


# --- parity with a live engine


def decisions(plan: StepPlan, now_ns: int) -> Any:
    """All of a plan but the tokens' values: what runs, where, on which blocks, and when."""
    new = [(n.request_id, len(n.token_ids), n.num_prompt_tokens, n.write_full_from, n.key_floor) for n in plan.new]
    return now_ns, plan.step, plan.gone, new, plan.requests


TINY = facts_from_config(
    {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 3, "sliding_window": 33, "vocab_size": 100,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 4096,
    },
    name="tiny", source="test",
)  # fmt: skip
"""A model whose lost windows are rebuilt from 64 tokens, so that it pays within these short prompts."""


def live_run(sessions: Sequence[Session], scenario: Scenario, sizes: PoolSizes, cost: CostModel) -> list[Any]:
    """The sessions through the engine's own loop, with real tokens and hashes."""
    kv, engine = scenario.kv, scenario.engine
    core = EngineCore(
        KVManager(TINY.kv_geometry(2), sizes, KVPolicy(retention=kv.retention, eviction=kv.eviction)),
        SchedulerPolicy(engine.max_num_seqs, engine.max_num_batched_tokens, engine.ageing_tokens_per_s),
        fingerprint="live",
        vocab_size=1 << 30,
    )
    clock, seen = Clock(), []
    runner = PacedRunner(cost, clock, say=int, seen=lambda plan, now_ns: seen.append(decisions(plan, now_ns)))
    local = LocalEngine(core, runner, audit="off", clock_ns=lambda: clock.now_ns)
    tokens, order, numbers = TokenSource(0, 1 << 29), count(), count()
    said: dict[int, list[int]] = {}
    sent: dict[str, tuple[int, int, list[int]]] = {}
    due = [(round((s.arrival_s or 0.0) * 1e9), next(order), index, 0) for index, s in enumerate(sessions)]
    heapq.heapify(due)
    while due or local.busy:
        while due and due[0][0] <= clock.now_ns:
            arrival_ns, _, index, place = heapq.heappop(due)
            turn = sessions[index].turns[place]
            before = said.get(index, []) if sessions[index].growing else []
            prompt = before + [token + (1 << 20) for token in tokens.token_ids(turn.pieces)]
            name = str(next(numbers))
            sent[name] = (index, place, prompt)
            params = SamplingParams(temperature=0.0, max_tokens=turn.output_len, ignore_eos=True)
            local.add(AddRequest(name, prompt, params, arrival_ns=arrival_ns))
        if not local.busy:
            clock.now_ns = due[0][0]
            continue
        for output in local.step():
            index, place, so_far = sent[output.request_id]
            so_far += output.token_ids
            if output.finish_reason is None:
                continue
            said[index] = so_far
            if place + 1 < len(sessions[index].turns):
                delay_ns = round(sessions[index].turns[place + 1].delay_s * 1e9)
                heapq.heappush(due, (clock.now_ns + delay_ns, next(order), index, place + 1))
    return seen


def tied(num: int, *, growing: bool) -> list[Session]:
    """Sessions that begin at few instants, of few lengths, with a common beginning: as many ties as can be had."""
    sessions = []
    for index in range(num):
        own = [
            Turn(pieces=(Piece(f"{index}-{turn}", 48 + 16 * (index % 2)),), output_len=60, delay_s=0.002 * (index % 3))
            for turn in range(3)
        ]
        first = replace(own[0], pieces=(Piece("shared", 160), *own[0].pieces))
        if not growing:
            own = [replace(turn, pieces=(*first.pieces[:1], *turn.pieces)) for turn in own]
        sessions.append(Session((first, *own[1:]), growing=growing, arrival_s=0.004 * (index // 8)))
    return sessions


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("eviction", ["value", "lru"])
@pytest.mark.parametrize(
    ("sizes", "seats", "happens"),
    [
        (ROOMY, 256, None),
        (PoolSizes(16, 80, 40, 900), 16, "preemptions"),
        (PoolSizes(16, 60, 12, 900), 4, "rebuilt_share"),
    ],
)
def test_a_live_engine_decides_the_same(
    growing: bool, eviction: str, sizes: PoolSizes, seats: int, happens: str | None
) -> None:
    """The same plans, block for block, at the same instants: with real tokens in the engine's own loop, and with names
    in simulated time."""
    scenario = parse_scenario(
        f'[kv]\nblock_size = 16\neviction = "{eviction}"\n'
        f"[engine]\nmax_num_seqs = {seats}\nmax_num_batched_tokens = 64\n",
        "test",
    )
    sessions = tied(24, growing=growing)
    for cost in (LinearCost(MS), LinearCost(MS, MS // 64)):
        simulated: list[Any] = []

        def watch(plan: StepPlan, now_ns: int, simulated: list[Any] = simulated) -> None:
            simulated.append(decisions(plan, now_ns))

        run = build(scenario, TINY, cost=cost, sizes=sizes, watch=watch)
        results = run.run(sessions)
        assert results.finished == 72
        assert simulated == live_run(sessions, scenario, sizes, cost)
        assert (results.evicted_full_blocks > 0) == (sizes is not ROOMY)
        assert happens is None or getattr(results, happens) > 0


@pytest.mark.parametrize("capacity", [50, 500])
def test_a_cache_under_independent_references(capacity: int) -> None:
    """Che's approximation of a least-recently-used cache: item i is there with 1 - exp(-q_i T), and T is where these
    add up to the capacity. 1,000 prompts of one block and a token, Zipf's popularity. Met to 1.5 points: eviction looks
    at a sample of the blocks, and first references can't hit."""
    items, references = 1000, 20_000
    weights = [1 / (k + 1) ** 0.8 for k in range(items)]
    popularity = [weight / sum(weights) for weight in weights]
    chosen = random.Random(7).choices(range(items), popularity, k=references)
    sessions = [request(f"item-{item}", float(index), 17, 1) for index, item in enumerate(chosen)]
    run = build(
        parse_scenario('[kv]\neviction = "lru"\n', "test"),
        model_facts("llama-3.1-8b"),
        cost=LinearCost(1000),
        sizes=PoolSizes(16, capacity + 1, 0, 10_000),  # one block more, for the token that a request adds
    )
    hit = run.run(sessions).full_hit * 17 / 16
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        held = sum(1 - math.exp(-q * middle) for q in popularity)
        low, high = (middle, high) if held < capacity else (low, middle)
    expected = sum(q * (1 - math.exp(-q * low)) for q in popularity)
    assert hit == pytest.approx(expected, abs=0.015)
