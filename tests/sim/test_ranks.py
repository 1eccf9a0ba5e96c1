"""Ranks that wait for one another, and workers that only prefill or only decode, against schedules made by hand."""

from collections import defaultdict
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.engine.plan import StepPlan
from cygnet.kv.sizing import PoolSizes
from cygnet.sim.assembly import Simulation, build, kv_geometry, pool_sizes
from cygnet.sim.cost import CostModel, LinearCost
from cygnet.sim.model_config import facts_from_config
from cygnet.sim.model_table import model_facts
from cygnet.sim.scenario import parse_scenario
from cygnet.sim.sessions import Piece, Session, Turn, random_sessions, with_poisson_arrivals

MS = 1_000_000
DENSE = model_facts("gemma-3-270m")
SPARSE = facts_from_config(
    {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 100, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 4096,
    },
    name="tiny-moe", source="test",
)  # fmt: skip
ROOMY = PoolSizes(4, 20_000, 20_000, 60_000)
REPLICA = '[fleet]\nworkers = 2\nep = 2\ndispatch = "round_robin"\n'


def simulation(text: str, *, cost: CostModel, facts: Any = SPARSE, sizes: PoolSizes = ROOMY, **more: Any) -> Simulation:
    return build(parse_scenario(text, "test"), facts, cost=cost, sizes=sizes, **more)


def request(name: str, at_ms: float, prompt: int, output: int) -> Session:
    return Session((Turn(pieces=(Piece(name, prompt),), output_len=output),), arrival_s=at_ms / 1e3)


def rows(run: Simulation) -> list[tuple[int, int, int]]:
    """Arrival, first token and end of each request, in ms."""
    columns = run.recorder.columns()
    names = ("arrival_ns", "first_ns", "end_ns")
    return sorted(tuple(int(v) // MS for v in row) for row in zip(*(columns[name] for name in names), strict=True))  # type: ignore[misc]


# --- ranks that wait for one another


def test_a_schedule_of_two_ranks_by_hand() -> None:
    """The five requests of `test_a_schedule_of_two_workers_by_hand`, by ranks that wait: 10 ms and 1 ms a token.

    rank 0   0-18 r0 8 | 18-41 r0 1, r2 12 | 41-67 r4 16 | 67-81 r4 4
    rank 1   0-18 r1 4 | 18-41 r3 4        | 41-67 r3 1  |
    waits    4         | 9                 | 15          | 14
    """
    run = simulation(f"{REPLICA}[engine]\nmax_num_batched_tokens = 16\n", cost=LinearCost(10 * MS, MS))
    results = run.run(
        [request("r0", 0, 8, 2), request("r1", 0, 4, 1), request("r2", 5, 12, 1), request("r3", 5, 4, 2),
         request("r4", 20, 20, 1)]
    )  # fmt: skip
    assert rows(run) == [(0, 18, 18), (0, 18, 41), (5, 41, 41), (5, 41, 67), (20, 81, 81)]
    assert results.waiting_share == pytest.approx((4 + 9 + 15 + 14) / (2 * 81))
    assert run.cluster.audit() == []


def test_a_short_request_waits_for_another_rank_s_long_one() -> None:
    """Alone it takes 11 ms; beside a chunk of 100 tokens 110. Ranks of other replicas are not in its way."""
    sessions = [request("long", 0, 100, 1), request("short", 0, 1, 1)]
    apart = simulation(REPLICA + "sync = false\n", cost=LinearCost(10 * MS, MS))
    together = simulation(REPLICA, cost=LinearCost(10 * MS, MS))
    others = simulation(REPLICA.replace("ep = 2", "ep = 1"), cost=LinearCost(10 * MS, MS))
    assert [run.run(sessions).finished for run in (apart, together, others)] == [2, 2, 2]
    assert rows(apart) == rows(others) == [(0, 11, 11), (0, 110, 110)]
    assert rows(together) == [(0, 110, 110), (0, 110, 110)]


MIX = with_poisson_arrivals(
    random_sessions(num_sessions=24, turns=3, input_len=70, output_len=30, shared_prefix_len=200), 40.0, seed=0
)


@pytest.mark.parametrize("tiers", ["", "[store]\ncapacity_gb = 1\n"])
def test_steps_of_ranks_in_one_event_change_nothing(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of every rank, at the same nanosecond, as with one event per step; and all begin together."""

    def outcome(*, single: bool) -> Any:
        starts: dict[int, list[Any]] = defaultdict(list)

        def watch(plan: StepPlan, now_ns: int) -> None:
            starts[now_ns].append((plan.step, plan.requests, plan.gone))

        kv = "[kv]\nblock_size = 16\n" + ("host_cache = '64MiB'\n" if tiers else "")
        text = REPLICA.replace("workers = 2", "workers = 4") + kv + tiers
        sizes = PoolSizes(16, 160, 0, 1400)
        run = simulation(text, cost=LinearCost(MS, MS // 64), sizes=sizes, watch=watch)
        with monkeypatch.context() as patch:
            if single:
                patch.setattr("cygnet.engine.core.EngineCore.num_repeats", lambda core: 0)
            results = run.run(MIX)
        assert run.cluster.audit() == []
        # Plans of one instant may be shown in another order.
        shown = {now: sorted(plans, key=repr) for now, plans in starts.items()}
        return shown, rows(run), replace_steps(results), run.loop.num_events

    slow, quick = outcome(single=True), outcome(single=False)
    assert quick[:3] == slow[:3]
    assert quick[3] < slow[3] / 2


def replace_steps(results: Any) -> Any:
    """Waiting is counted by the first of repeated steps, which with this cost is exact."""
    return results.finished, results.steps, results.effective_hit, results.preemptions, results.waiting_share


def test_a_rank_takes_its_replica_down_with_it() -> None:
    """Four ranks in two replicas; rank 1 dies at 1 s for 1 s. Its replica serves nothing then, the other one all."""
    text = REPLICA.replace("workers = 2", "workers = 4") + "[[faults]]\nworker = 1\nat_s = 1.0\nfor_s = 1.0\n"
    seen: set[int] = set()

    def watch(plan: StepPlan, now_ns: int) -> None:
        if 1_000 * MS <= now_ns < 2_000 * MS:
            seen.update(index for index, worker in enumerate(run.cluster.workers) if worker.core.num_requests)

    run = simulation(text, cost=LinearCost(40 * MS, MS // 16), watch=watch)
    sessions = [request(f"r{n}", n * 25, 64, 20) for n in range(120)]
    results = run.run(sessions)
    assert seen == {2, 3}
    assert results.refused["broken off"] > 1
    assert results.finished + sum(results.refused.values()) == 120
    assert all(len(worker.dead) == (index < 2) for index, worker in enumerate(run.cluster.workers))
    assert run.cluster.audit() == []
    with pytest.raises(ConfigError, match="worker 0 is to die at"):
        simulation(text + "[[faults]]\nworker = 0\nat_s = 1.5\nfor_s = 1.0\n", cost=LinearCost(MS))


# --- prefill here, decode there

APART = '[fleet]\ndispatch = "round_robin"\n[decode]\nworkers = 1\nhost_cache = "256MiB"\n'


def test_a_hand_over_by_hand() -> None:
    """A step takes 10 ms and 1 ms a token; blocks of 4; a question to a prefill worker takes 1 ms, a piece as long and
    what its bytes take, which here is nothing to speak of.

    prefill   0-18 r 8 tokens: the first token at 18
    decode    18-19 lookup | 19-20 fetch of both blocks | 20-31 token 2 (r: the one token that is not there) |
              31-42 token 3 | 42-53 token 4
    """
    text = APART + "latency_us = 1000\nbandwidth_gb_s = 1e6\n"
    plans: list[Any] = []

    def watch(plan: StepPlan, now_ns: int) -> None:
        plans.append((now_ns // MS, [(r.start, r.num_tokens) for r in plan.requests]))

    run = simulation(text, cost=LinearCost(10 * MS, MS), watch=watch)
    results = run.run([request("r", 0, 8, 4)])
    assert rows(run) == [(0, 18, 53)]
    assert plans == [(0, [(0, 8)]), (20, [(8, 1)]), (31, [(9, 1)]), (42, [(10, 1)])]
    assert run.recorder.columns()["handover_ns"].tolist()[0] // MS == 2
    assert results.output_tokens == 4
    assert results.decode_busy_share == pytest.approx(33 / 53, abs=0.001)
    assert results.decoding == pytest.approx(33 / 53, abs=0.001)
    assert run.cluster.audit() == []


def test_what_is_handed_over_takes_its_way() -> None:
    """1,000 blocks of 4 tokens at 1 GB/s, each 3 layers x 4 heads x 64 x 2 bytes a token and half a kilobyte around it
    (a stored object): 6.7 ms."""
    text = APART + "latency_us = 0\nbandwidth_gb_s = 1\n"
    run = simulation(text, cost=LinearCost(MS))
    run.run([request("r", 0, 4000, 2), request("one", 100, 4000, 1)])
    first, alone = run.recorder.columns()["handover_ns"].tolist()
    assert first == pytest.approx(1000 * (4 * 3 * 4 * 64 * 2 + 512), abs=10)
    assert alone == 0  # its only token is the prefill's
    assert run.cluster.workers[1].core.stats().prompt_tokens_total == 4001


@pytest.mark.parametrize("dispatch", ["router", "session", "round_robin"])
@pytest.mark.parametrize("facts", [DENSE, SPARSE])
def test_everything_is_served_apart(dispatch: str, facts: Any) -> None:
    """Windows and all: decode workers compute no more of a prompt than the block that is not whole."""
    text = (
        f'[fleet]\nworkers = 2\ndispatch = "{dispatch}"\n[decode]\nworkers = 2\nhost_cache = "512MiB"\n'
        "[kv]\nblock_size = 16\n"
    )
    computed: list[int] = []

    def watch(plan: StepPlan, now_ns: int) -> None:
        for worker in run.cluster.workers[2:]:
            if worker.plan is plan:
                computed.extend(r.num_tokens for r in plan.requests)

    sizes = PoolSizes(16, 20_000, 20_000, 60_000)
    run = simulation(text, cost=LinearCost(MS, MS // 64), facts=facts, sizes=sizes)
    for worker in run.cluster.workers[2:]:
        worker._watch = watch
    results = run.run(MIX)
    assert results.finished == 72
    assert results.output_tokens == 72 * 30
    assert max(computed) <= 16
    assert run.cluster.audit() == []
    assert sum(worker.core.stats().generation_tokens_total for worker in run.cluster.workers[:2]) == 72
    # Later turns find their prompts with the worker that prefilled the one before, but for the answer.
    assert results.effective_hit > (0.5 if dispatch == "session" else 0.2)


def test_a_pair_is_chosen_by_what_each_side_has() -> None:
    """Four at once: prefill workers by their tokens, decode workers by the contexts that they hold."""
    text = '[fleet]\nworkers = 2\ndispatch = "router"\n[routing]\npolicy = "least_loaded"\n[decode]\nworkers = 2\n'
    pairs: list[tuple[str, int, int]] = []
    run = simulation(text + 'host_cache = "256MiB"\n', cost=LinearCost(MS))
    placed = run.cluster.deliver

    def note(request_id: str, worker: int, decode: int) -> None:
        pairs.append((request_id, worker, decode))
        placed(request_id, worker, decode)

    run.cluster.dispatch._placed = note  # type: ignore[attr-defined]
    # The long one's prefill is over when the others come, its decode is not.
    run.run([request("long", 0, 4000, 1000), *(request(f"r{n}", 100, 1000, 500) for n in range(4))])
    long_decode = pairs[0][2]
    assert {decode for _, _, decode in pairs} <= {2, 3}
    assert [decode == long_decode for _, _, decode in pairs[1:]].count(True) == 0
    assert sorted(worker for _, worker, _ in pairs[1:]) == [0, 0, 1, 1]
    assert run.cluster.dispatch.audit() == []


def test_a_prefill_worker_dies() -> None:
    """What it was computing goes elsewhere; what it had handed over goes on."""
    text = APART.replace("[fleet]\n", "[fleet]\nworkers = 2\n") + "[[faults]]\nworker = 0\nat_s = 0.1\nfor_s = 0.2\n"
    run = simulation(text, cost=LinearCost(10 * MS, MS))
    results = run.run([request(f"r{n}", 20 * n, 40, 10) for n in range(20)])
    assert results.finished == 20
    assert not results.refused
    assert run.cluster.audit() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[decode]\nworkers = 1\n[kv]\nprefix_cache = false\n", "take over KV by its prefix"),
        ("[decode]\nworkers = 1\nhost_cache = 'off'\n", "decode.host_cache is where"),
        ("[decode]\nworkers = 1\n[[faults]]\nworker = 1\nat_s = 1\nfor_s = 1\n", "those of the fleet are 0 to 0"),
        ("[fleet]\nexpert_balance_ep = 1\n", "expert_balance_ep = 1"),
        ("[decode]\nworker = 1\n", "did you mean decode.workers"),
    ],
)
def test_fleets_that_can_not_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation(text, cost=LinearCost(MS))


# --- one pool


def test_one_pool_holds_a_seventh() -> None:
    """MiMo-V2.5-Pro: 10 of 70 layers see all, all with as many heads, so one pool has 7 times the bytes per token."""
    facts = model_facts("mimo-v2.5-pro")
    text = (
        "[model]\none_pool = {}\n[fleet]\ngpu = 'H20'\ntp = 8\nep = 32\nworkers = 4\ndispatch = 'router'\n"
        "[kv]\nsession_tokens = 100000\n"
    )
    one, two = (parse_scenario(text.format(value), "test") for value in ("true", "false"))
    assert kv_geometry(one, facts).full.token_bytes == 7 * kv_geometry(two, facts).full.token_bytes
    assert not kv_geometry(one, facts).has_swa
    held = [sizes.full_blocks for sizes in (pool_sizes(one, facts), pool_sizes(two, facts))]
    assert 6 < held[1] / held[0] < 7
    run = build(one, facts)
    assert run.run([request("r", 0, 30_000, 5), request("r", 60_000, 30_000, 5)]).effective_hit > 0.49
