"""Host and store in simulation, by the engine's own tiers; and that many steps in one event change nothing."""

from dataclasses import replace
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.base.messages import RequestOutput
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import StepPlan, StepResult
from cygnet.kv.sizing import PoolSizes
from cygnet.sim.assembly import Simulation, build
from cygnet.sim.cost import LinearCost, RooflineCost
from cygnet.sim.hardware import HARDWARE
from cygnet.sim.model_table import model_facts
from cygnet.sim.scenario import parse_scenario
from cygnet.sim.sessions import Piece, Session, Turn, random_sessions, with_poisson_arrivals

MS = 1_000_000
FACTS = model_facts("gemma-3-270m")
SMALL = PoolSizes(16, 90, 140, 1400)
"""Room for one of the sessions below."""
HOST = "[kv]\nblock_size = 16\nhost_cache = '256MiB'\n"
STORE = f"{HOST}[store]\ncapacity_gb = 10\n"


def simulation(text: str, *, sizes: PoolSizes = SMALL, **more: Any) -> Simulation:
    return build(parse_scenario(text, "test"), FACTS, cost=more.pop("cost", LinearCost(MS)), sizes=sizes, **more)


def turn_about(num: int, turns: int) -> list[Session]:
    """Sessions of 1,000 tokens and 50 more a turn, which take turns: each comes back when all others have been."""
    sessions = []
    for index in range(num):
        asked = [
            Turn(pieces=(Piece(f"{index}", 1000 + 50 * turn),), output_len=2, delay_s=1.0) for turn in range(turns)
        ]
        sessions.append(Session(tuple(asked), arrival_s=index / num))
    return sessions


def test_what_the_device_evicts_comes_from_the_host() -> None:
    without, with_host = (simulation(text) for text in ("[kv]\nblock_size = 16\n", HOST))
    cold, warm = (run.run(turn_about(3, 4)) for run in (without, with_host))
    assert cold.effective_hit < 0.05
    # 9 of 12 requests find what their session had asked before, in whole blocks: 992, 1040 and 1088 tokens.
    expected = 3 * (992 + 1040 + 1088) / (3 * (1000 + 1050 + 1100 + 1150))
    assert warm.effective_hit == pytest.approx(expected, abs=0.005)
    assert 0.9 * expected < warm.host_hit <= warm.effective_hit
    assert warm.store_hit == 0
    assert with_host.cluster.audit() == []


def test_what_another_worker_computed_comes_from_the_store() -> None:
    text = "[fleet]\nworkers = 2\ndispatch = 'round_robin'\n"
    (session,) = turn_about(1, 4)  # its turns go to the workers in turn
    alone, shared = (simulation(text + part, sizes=replace(SMALL, full_blocks=400)) for part in (HOST, STORE))
    before, after = alone.run([session]), shared.run([session])
    assert before.store_hit == 0
    # The second turn; later ones find all but 48 tokens where they were two turns before, which is not worth a fetch.
    assert after.store_hit == pytest.approx(992 / 4300)
    assert after.effective_hit > before.effective_hit
    assert shared.store is not None
    assert shared.store.audit() == shared.cluster.audit() == []
    columns = shared.recorder.columns()
    assert (columns["host_tokens"] + columns["store_tokens"] <= columns["cached_tokens"]).all()


def test_a_store_that_is_too_slow_is_not_waited_for() -> None:
    text = f"[fleet]\nworkers = 2\ndispatch = 'round_robin'\n{STORE}latency_us = 1000000\n"
    run = simulation(text.replace("host_cache", "store_timeout_ms = 20\nstore_timeout_ms_per_1k = 0\nhost_cache"))
    results = run.run(turn_about(1, 4))
    assert results.finished == 4
    assert results.store_hit == 0
    ttft = run.recorder.columns()["first_ns"] - run.recorder.columns()["arrival_ns"]
    assert ttft.max() < 50 * MS
    assert sum(worker.core.stats().store_timeouts_total for worker in run.cluster.workers) > 0
    assert run.cluster.audit() == []


@pytest.mark.parametrize("ttl_s", [0.0, 0.5])
def test_what_is_not_used_for_long_is_gone_from_the_store(ttl_s: float) -> None:
    text = f"[fleet]\nworkers = 2\ndispatch = 'round_robin'\n{STORE}ttl_s = {ttl_s}\n"
    results = simulation(text).run(turn_about(1, 4))  # a turn a second
    assert (results.store_hit > 0) == (ttl_s == 0)


def test_transfers_take_their_time() -> None:
    """1,000 blocks of 16 tokens of Llama 8B, 2,097,152 bytes each, at 51.2 GB/s: 41 ms, beside the step."""
    facts = model_facts("llama-3.1-8b")
    seen: list[tuple[StepPlan, int]] = []
    cost = RooflineCost(facts, HARDWARE.get("H200"), block_size=16)
    run = build(
        parse_scenario("[kv]\nblock_size = 16\nhost_cache = '8GiB'\n", "test"),
        facts,
        sizes=PoolSizes(16, 1001, 0, 16_016),
        cost=cost,
        watch=lambda plan, now_ns: seen.append((plan, now_ns)),
    )
    one, other = Piece("one", 16_001), Piece("other", 16_001)
    run.run(
        [Session((Turn(pieces=(piece,), output_len=1),), arrival_s=at) for at, piece in enumerate((one, other, one))]
    )
    (loading,) = [plan for plan, _ in seen if plan.transfers.loads]
    assert len(loading.transfers.loads.full) == 1000
    copy_ns = 1000 * 2_097_152 / (64e9 * 0.8) * 1e9
    assert cost.step_ns(loading) == pytest.approx(copy_ns, rel=0.01)
    columns = run.recorder.columns()
    assert columns["host_tokens"].tolist() == [0, 0, 16_000]
    assert columns["end_ns"][2] - columns["arrival_ns"][2] == cost.step_ns(loading)


MIX = random_sessions(num_sessions=30, turns=3, input_len=70, output_len=40, shared_prefix_len=200)


@pytest.mark.parametrize("text", ["", HOST, STORE, f"{HOST}write_policy = 'back'\n"])
def test_bookkeeping_holds_with_all_tiers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[str] = []
    apply = EngineCore.apply

    def audited(core: EngineCore, result: StepResult, now_ns: int) -> list[RequestOutput]:
        outputs = apply(core, result, now_ns)
        faults.extend(core.audit())
        return outputs

    monkeypatch.setattr(EngineCore, "apply", audited)
    run = simulation(f"[fleet]\nworkers = 2\ndispatch = 'round_robin'\n{text}", sizes=PoolSizes(16, 60, 140, 900))
    results = run.run(with_poisson_arrivals(MIX, 200.0, seed=0))
    assert faults == []
    assert results.finished == 90
    assert results.evicted_full_blocks > 0
    assert run.cluster.audit() == []


@pytest.mark.parametrize("rate", [20.0, 300.0])
@pytest.mark.parametrize(
    "text", ["", HOST, STORE, "[routing]\npolicy = 'cache_aware'\n"], ids=["", "host", "store", "router"]
)
def test_many_steps_in_one_event_are_the_same_steps(text: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request's times and hits, and every counter, as when each step is an event."""

    def outcome() -> tuple[Any, Any, int]:
        dispatch = "router" if "routing" in text else "round_robin"
        run = simulation(
            f"[fleet]\nworkers = 3\ndispatch = '{dispatch}'\n{text}",
            sizes=PoolSizes(16, 120, 160, 900),
            cost=LinearCost(MS, MS // 64),
        )
        results = run.run(with_poisson_arrivals(MIX, rate, seed=0))
        return results, {name: column.tolist() for name, column in run.recorder.columns().items()}, run.loop.num_events

    at_once = outcome()
    monkeypatch.setattr(EngineCore, "num_repeats", lambda core: 0)
    one_by_one = outcome()
    assert at_once[:2] == one_by_one[:2]
    assert at_once[2] < one_by_one[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[store]\ncapacity_gb = 1\n", "set kv.host_cache"),
        ("[kv]\nhost_cache = 'auto'\n", "a size per accelerator"),
        ("[kv]\nhost_cache = '1KiB'\n", "below the minimum"),
        ("[kv]\nstore = '/data/kv:1GiB'\n", r"described by \[store\]"),
    ],
)
def test_tiers_that_can_not_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation(text)
