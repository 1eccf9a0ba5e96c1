"""The real router before simulated workers, and workers that die."""

from collections import Counter
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.kv.sizing import PoolSizes
from cygnet.sim.assembly import Simulation, build
from cygnet.sim.cost import LinearCost
from cygnet.sim.model_table import model_facts
from cygnet.sim.scenario import parse_scenario
from cygnet.sim.sessions import Piece, Session, Turn, random_sessions, with_poisson_arrivals

MS = 1_000_000
FACTS = model_facts("gemma-3-270m")
ROOMY = PoolSizes(16, 20_000, 20_000, 60_000)
POLICIES = ["cache_aware", "least_loaded", "power_of_two", "round_robin", "consistent_hash", "session"]


def simulation(text: str, *, workers: int = 2, sizes: PoolSizes = ROOMY, more: str = "", **given: Any) -> Simulation:
    scenario = parse_scenario(f"[fleet]\nworkers = {workers}\ndispatch = 'router'\n{more}\n{text}", "test")
    return build(scenario, FACTS, cost=LinearCost(MS, MS // 64), sizes=sizes, **given)


def request(name: str, at_s: float, prompt: int, output: int = 4) -> Session:
    return Session((Turn(pieces=(Piece(name, prompt),), output_len=output),), arrival_s=at_s)


MIX = with_poisson_arrivals(
    random_sessions(num_sessions=40, turns=5, input_len=600, output_len=20, shared_prefix_len=512), 20.0, seed=0
)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything(policy: str) -> None:
    run = simulation(f"[routing]\npolicy = '{policy}'\n", workers=3)
    results = run.run(MIX)
    assert results.finished == 200
    assert run.cluster.audit() == []
    assert run.cluster.dispatch.audit() == []


def test_requests_go_where_their_prefix_is() -> None:
    hits = {
        policy: simulation(f"[routing]\npolicy = '{policy}'\n", workers=4).run(MIX).effective_hit
        for policy in ("cache_aware", "round_robin")
    }
    # Of a session's 5 x 1,112 + 10 x 620 tokens 5 x 512 + 10 x 620 were there before, less parts of blocks: 74.5 %.
    assert hits["cache_aware"] > 0.73
    assert hits["cache_aware"] > hits["round_robin"] + 0.15


def test_the_least_loaded_gets_the_next_one() -> None:
    """Prompts of 6,400, 640, 640 ... at once: the first worker gets one, the other all that fit beside it."""
    taken: Counter[int] = Counter()
    run = simulation("[routing]\npolicy = 'least_loaded'\n")
    deliver = run.cluster.deliver

    def note(request_id: str, worker: int, decode: int) -> None:
        taken[worker] += 1
        deliver(request_id, worker, decode)

    run.cluster.dispatch._placed = note  # type: ignore[attr-defined]
    run.run([request("long", 0.0, 6400), *(request(f"short-{n}", 0.0, 640) for n in range(6))])
    assert sorted(taken.values()) == [1, 6]


def test_a_full_fleet_makes_requests_wait_in_the_router() -> None:
    text = "[routing]\nworker_budget_tokens = 2000\n"
    sessions = [request(f"r{n}", 0.0, 1500) for n in range(12)]
    run = simulation(text)
    results = run.run(sessions)
    assert results.finished == 12
    assert run.cluster.dispatch.num_queued == 10  # type: ignore[attr-defined]
    assert run.cluster.audit() == []
    small = simulation(f"{text}[queue]\nmax_waiting = 3\n").run(sessions)
    assert small.refused == {"router's queue full": 7}
    impatient = simulation(f"{text}[queue]\nmax_wait_s = 0.05\n").run(sessions)
    assert impatient.refused["waited too long"] + impatient.finished == 12
    assert 0 < impatient.finished < 12


def test_long_prompts_have_workers_of_their_own() -> None:
    text = "[routing]\nbuckets = ['short=0-1K', 'long=1K-64K']\n"
    run = simulation(text, workers=3, more="groups = { short = 2, long = 1 }")
    run.run([request(f"s{n}", n / 10, 500) for n in range(8)] + [request(f"l{n}", 1 + n, 5000) for n in range(5)])
    prompts = [worker.core.stats().prompt_tokens_total for worker in run.cluster.workers]
    assert sum(prompts[:2]) == 8 * 500
    assert prompts[2] == 5 * 5000


@pytest.mark.parametrize("dispatch", ["router", "session", "round_robin"])
def test_a_worker_dies_and_comes_back(dispatch: str) -> None:
    """Requests that have not answered go elsewhere, others are broken off with their sessions; nothing else is lost."""
    text = "[[faults]]\nworker = 1\nat_s = 1.0\nfor_s = 0.5\n[[faults]]\nworker = 1\nat_s = 2.5\nfor_s = 0.1\n"
    scenario = parse_scenario(f"[fleet]\nworkers = 3\ndispatch = '{dispatch}'\n{text}", "test")
    run = build(scenario, FACTS, cost=LinearCost(4 * MS, MS // 16), sizes=ROOMY)
    results = run.run(MIX)
    assert results.refused.keys() == {"broken off"}
    broken = results.refused["broken off"]
    assert 0 < broken < 40
    ended = Counter(run.recorder.columns()["prompt_tokens"].tolist())
    assert results.finished >= 200 - 5 * broken
    assert ended[512 + 600] >= 40 - broken
    assert run.cluster.audit() == []
    assert all(worker.core.num_requests == 0 for worker in run.cluster.workers)
    again = build(scenario, FACTS, cost=LinearCost(4 * MS, MS // 16), sizes=ROOMY)
    assert again.run(MIX) == results


def test_who_waits_in_the_router_is_not_sent_to_a_dead_worker() -> None:
    text = "[routing]\nworker_budget_tokens = 2000\n[[faults]]\nworker = 1\nat_s = 0.01\nfor_s = 30.0\n"
    run = simulation(text)
    results = run.run([request(f"r{n}", 0.0, 1500) for n in range(12)])
    assert results.finished + results.refused.get("broken off", 0) == 12
    assert run.cluster.workers[1].core.stats().steps_total == 0
    assert run.cluster.audit() == []


def test_without_any_worker_requests_are_refused() -> None:
    run = simulation("[[faults]]\nworker = 0\nat_s = 1.0\nfor_s = 5.0\n", workers=1)
    results = run.run([request("a", 0.0, 100), request("b", 2.0, 100), request("c", 7.0, 100)])
    assert (results.finished, results.refused) == (2, {"no worker": 1})
    assert run.cluster.audit() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[fleet]\nworkers = 2\ndispatch = 'router'\ngroups = { a = 1 }\n", "fleet.groups are 1 workers"),
        ("[fleet]\nworkers = 1\ngroups = { a = 1 }\n", "need fleet.dispatch = 'router'"),
        ("[fleet]\nworkers = 1\ndispatch = 'router'\ngroups = { a = 1 }\n", "no bucket of routing.buckets"),
        ("[fleet]\ndispatch = 'router'\n[routing]\npolicy = 'best'\n", "best"),
        ("[[faults]]\nworker = 3\nat_s = 1\nfor_s = 1\n", "there is no worker 3"),
        (
            "[[faults]]\nworker = 0\nat_s = 1\nfor_s = 2\n[[faults]]\nworker = 0\nat_s = 2\nfor_s = 1\n",
            "when it is away",
        ),
    ],
)
def test_fleets_that_can_not_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(parse_scenario(text, "test"), FACTS, sizes=ROOMY)
