"""Scenarios: reading, refusing, what is asked, pools and reports."""

from pathlib import Path

import msgspec
import pytest

from cygnet.base.errors import ConfigError
from cygnet.kv.sizing import plan_pools
from cygnet.sim.assembly import build, pool_sizes
from cygnet.sim.comparison import Estimate, estimates, measures
from cygnet.sim.cost import LinearCost
from cygnet.sim.model_table import model_facts
from cygnet.sim.results import Results
from cygnet.sim.scenario import Scenario, parse_scenario
from cygnet.sim.sessions import Piece, Session, Turn
from cygnet.sim.workload import workload

EXAMPLES = Path(__file__).parents[2] / "examples"
GEMMA = model_facts("gemma-3-27b")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_examples_are_sound(file: Path) -> None:
    scenario = parse_scenario(file.read_text(), str(file))
    build(scenario, model_facts(scenario.model.name))


def test_sections_left_out_keep_their_defaults() -> None:
    scenario = parse_scenario("[kv]\neviction = 'lru'\n[engine]\nmax_num_seqs = 7\n", "x")
    assert (scenario.kv.block_size, scenario.kv.eviction) == (64, "lru")
    assert (scenario.engine.max_num_seqs, scenario.engine.max_num_batched_tokens) == (7, 8192)


def test_settings_are_overruled() -> None:
    sets = ["fleet.workers=8", "model.name=llama-3.1-8b", "kv.retention=['prompt_end']", "workload.agents.sessions=5"]
    scenario = parse_scenario("[fleet]\nworkers = 2\n", "x", sets)
    assert (scenario.fleet.workers, scenario.model.name, scenario.kv.retention) == (8, "llama-3.1-8b", ("prompt_end",))
    assert scenario.workload.agents.sessions == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[fleet", "not valid TOML"),
        ("[flet]\nworkers = 1", "unknown setting flet; did you mean fleet"),
        ("[fleet]\nworker = 1", "did you mean fleet.workers"),
        ("[workload.agents]\nturn = [1, 1]", "did you mean workload.agents.turns"),
        ("[fleet]\nworkers = 0", "fleet.workers"),
        ("[model]\nkv_bits = 4", "model.kv_bits"),
        ("[workload.agents]\nturns = [0, 1]", "workload.agents.turns"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"scenario my\.toml") as refused:
        parse_scenario(text, "my.toml")
    assert message in str(refused.value)


@pytest.mark.parametrize(("item", "message"), [("fleet.workers", "path=value"), ("seed.x=1", "seed is no section")])
def test_a_wrong_set_is_named(item: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario("seed = 1", "x", [item])


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("[fleet]\ntp = 2\nep = 3", "deepseek-v3", "multiple of fleet.tp"),
        ("[fleet]\ntp = 3", "gemma-3-27b", "fleet.tp = 3 does not divide the 32 heads"),
        ("[fleet]\nworkers = 3\nep = 2", "deepseek-v3", "2 ranks of a replica"),
        ("[fleet]\ngpu = 'H300'", "gemma-3-27b", "did you mean 'H"),
        ("[fleet]\ndispatch = 'sesion'", "gemma-3-27b", "did you mean 'session'"),
        ("[fleet]\ngpu = 'H100'", "llama-3.1-70b", "leaves nothing for KV; raise fleet.tp"),
        ("[kv]\nmemory = '1MiB'", "gemma-3-27b", "below the minimum"),
    ],
)
def test_what_cannot_be_built_says_why(text: str, model: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(parse_scenario(text, "x"), model_facts(model))
    assert message in str(refused.value)


def test_pools_are_the_engines_from_what_weights_leave() -> None:
    """141 GB x 0.9 - 4 GB - 54.015 GB; half of it; and a size of one's own."""
    left = 141e9 * 0.9 - 4e9 - GEMMA.resident_bytes(tp=1, ep=1)
    for memory, budget in ((None, int(left)), ("0.5", int(0.5 * int(left))), ("20GB", 20_000_000_000)):
        scenario = parse_scenario("" if memory is None else f"[kv]\nmemory = '{memory}'\n", "x")
        expected = plan_pools(
            GEMMA.kv_geometry(2), block_size=64, budget_bytes=budget, chunk=8192, model_max_len=131_072
        )
        assert pool_sizes(scenario, GEMMA) == expected


def test_a_rank_may_be_several_accelerators() -> None:
    """Llama 70B on two H200, with and without a word on experts it does not have; DeepSeek-V3 on eight."""
    for fleet in ("tp = 2", "tp = 2\nep = 8"):
        sizes = pool_sizes(parse_scenario(f"[fleet]\n{fleet}", "x"), model_facts("llama-3.1-70b"))
        left = 141e9 * 0.9 - 4e9 - model_facts("llama-3.1-70b").resident_bytes(tp=2, ep=1)
        assert sizes.full_blocks == int(left) // (64 * 327_680 // 2)
    assert build(parse_scenario("[fleet]\nworkers = 8\nep = 8", "x"), model_facts("deepseek-v3")).sizes.full_blocks > 0
    assert build(parse_scenario("[fleet]\ntp = 8", "x"), model_facts("deepseek-v3")).sizes.full_blocks > 0


# --- what is asked

TRACE = [
    Session((Turn(pieces=(Piece("b", 20),)), Turn(pieces=(Piece("b", 40),), delay_s=4.0)), arrival_s=30.0),
    Session((Turn(pieces=(Piece("a", 10),)),), arrival_s=10.0),
]


def asked(text: str, trace: list[Session] | None) -> tuple[list[Session], int]:
    made = workload(parse_scenario(text, "x"), trace)
    return list(made.sessions), made.num_requests


def test_a_trace_is_asked_in_the_order_of_its_times() -> None:
    sessions, num_requests = asked("", TRACE)
    assert [session.arrival_s for session in sessions] == [10.0, 30.0]
    assert num_requests == 3
    faster, _ = asked("[workload]\nspeed = 2.0", TRACE)
    assert [session.arrival_s for session in faster] == [5.0, 15.0]
    assert faster[1].turns[1].delay_s == 2.0


def test_a_trace_grows_in_length_and_in_density() -> None:
    longer, num_requests = asked("[workload]\ncopies = 3", TRACE)
    assert [session.arrival_s for session in longer] == [10.0, 30.0, 50.0, 70.0, 90.0, 110.0]
    assert num_requests == 9
    denser, num_requests = asked("[workload]\noverlay = 2", TRACE)
    assert [session.arrival_s for session in denser] == [10.0, 20.0, 30.0, 40.0]
    assert num_requests == 6
    assert len({session.turns[0].pieces for session in denser}) == 4


def test_a_rate_replaces_the_traces_times() -> None:
    one, same, other = (asked(f"seed = {n}\n[workload]\nrate = 5.0", TRACE)[0] for n in (1, 1, 2))
    assert one == same != other


def test_agents_are_generated_or_fitted() -> None:
    sessions, num_requests = asked("[workload]\nrate = 1.0\n[workload.agents]\nsessions = 10", None)
    assert num_requests == sum(len(session.turns) for session in sessions)
    fitted, _ = asked("[workload]\nrate = 1.0\nfit = true\n[workload.agents]\nsessions = 30", TRACE)
    assert len(fitted) == 30


@pytest.mark.parametrize(
    ("trace", "message"),
    [(None, "need workload.rate"), ([Session((Turn(pieces=(Piece("a", 1),)),))], "has no arrival times")],
)
def test_without_times_a_rate_is_asked_for(trace: list[Session] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked("", trace)


# --- comparing


def results_of(seed: int) -> Results:
    scenario = msgspec.structs.replace(Scenario(), seed=seed)
    run = build(scenario, GEMMA, cost=LinearCost(1_000_000))
    made = workload(
        parse_scenario(f"seed = {seed}\n[workload]\nrate = 1.0\n[workload.agents]\nsessions = 3", "x"), None
    )
    return run.run(made.sessions)


def test_an_estimate_is_a_mean_with_its_interval() -> None:
    """1, 2, 3: mean 2, deviation 1, t of 2 degrees 4.303."""
    assert Estimate.of([5.0]) == Estimate(5.0, None)
    three = Estimate.of([1.0, 2.0, 3.0])
    assert three.mean == 2.0
    assert three.half_width == pytest.approx(4.303 / 3**0.5)


def test_runs_are_compared_by_what_all_of_them_measured() -> None:
    runs = [results_of(seed) for seed in (1, 2)]
    rows = estimates(runs)
    assert rows["TTFT P90, ms"].mean == pytest.approx(sum(measures(run)["TTFT P90, ms"] for run in runs) / 2)
    assert "good requests per second" not in rows
