"""A scenario: which model on which accelerators, with which settings, asked what. Read from TOML.

`[kv]` and `[engine]` are those of `cygnet serve`, so that a scenario and a server say the same in the same words.
"""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cygnet.base.config import EngineSettings, KVSettings, check_memory
from cygnet.base.errors import ConfigError
from cygnet.engine.core import EngineCore
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager, KVPolicy
from cygnet.kv.sizing import PoolSizes, plan_pools
from cygnet.sim.agents import AgentProfile, Spread
from cygnet.sim.cluster import MAX_TOKEN_ID, Cluster
from cygnet.sim.cost import CostModel, RooflineCost
from cygnet.sim.events import EventLoop
from cygnet.sim.hardware import HARDWARE
from cygnet.sim.model_facts import ModelFacts
from cygnet.sim.results import Goals, Recorder, Results, summarize
from cygnet.sim.sessions import Session
from cygnet.sim.worker import SimWorker, Watch

FINGERPRINT = "simulated"


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model."""

    name: Annotated[str, Meta(description="a model of `cygnet plan`, or the path of a config.json")] = "gemma-3-27b"
    kv_bits: Annotated[Literal[8, 16], Meta(description="bits of a KV element")] = 16
    weight_bits: Annotated[float, Meta(ge=0, le=32, description="bits of a weight; 0: the checkpoint's")] = 0.0
    max_model_len: Annotated[int, Meta(ge=0, description="longest context served; 0: the model's")] = 0


class FleetPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers, all alike. A worker is one attention rank."""

    workers: Annotated[int, Meta(ge=1, le=4096, description="attention ranks, each with an engine of its own")] = 1
    gpu: Annotated[str, Meta(description="accelerator, as `cygnet plan` knows it")] = "H200"
    tp: Annotated[int, Meta(ge=1, description="accelerators per rank")] = 1
    ep: Annotated[int, Meta(ge=1, description="accelerators that share the experts, if any; tp or a multiple")] = 1
    dispatch: Annotated[str, Meta(description="which worker gets a request: session or round_robin")] = "session"
    memory_share: Annotated[float, Meta(gt=0, le=1, description="of the accelerator's memory that may be used")] = 0.9
    reserve_gb: Annotated[float, Meta(ge=0, description="of that, for activations and graphs")] = 4.0


Pair = tuple[Annotated[float, Meta(gt=0)], Annotated[float, Meta(ge=0)]]
"""Median and sigma of a log-normal distribution."""


class AgentsPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generated agents; medians and log-normal sigmas as in `AgentProfile`."""

    sessions: Annotated[int, Meta(ge=1)] = 100
    turns: Pair = (20, 1.0)
    system_tokens: Pair = (12_000, 0.5)
    num_systems: Annotated[int, Meta(ge=1)] = 8
    first_tokens: Pair = (1000, 1.2)
    added_tokens: Pair = (700, 1.4)
    output_tokens: Pair = (200, 1.0)
    pause_s: Pair = (5.0, 1.5)
    subagents_per_turn: Annotated[float, Meta(ge=0, le=1)] = 0.02
    subagent_turns: Pair = (6, 0.7)
    max_context: Annotated[int, Meta(ge=1024)] = 200_000

    def profile(self) -> AgentProfile:
        """The same as the generator takes it."""
        return AgentProfile(
            turns=Spread(*self.turns),
            system_tokens=Spread(*self.system_tokens),
            num_systems=self.num_systems,
            first_tokens=Spread(*self.first_tokens),
            added_tokens=Spread(*self.added_tokens),
            output_tokens=Spread(*self.output_tokens),
            pause_s=Spread(*self.pause_s),
            subagents_per_turn=self.subagents_per_turn,
            subagent_turns=Spread(*self.subagent_turns),
            max_context=self.max_context,
        )


class WorkloadPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked: a trace, or generated agents."""

    trace: Annotated[str, Meta(description="trace file, relative to the scenario; empty: generated agents")] = ""
    limit: Annotated[int, Meta(ge=0, description="sessions taken from the trace; 0: all")] = 0
    rate: Annotated[float, Meta(ge=0, description="sessions per second, Poisson; 0: the trace's own times")] = 0.0
    speed: Annotated[float, Meta(gt=0, description="replay a trace's times and pauses so much faster")] = 1.0
    copies: Annotated[int, Meta(ge=1, description="times the trace, one after another, each of its own texts")] = 1
    overlay: Annotated[int, Meta(ge=1, description="times the trace at once: so many times the load")] = 1
    fit: Annotated[bool, Meta(description="generate agents that are like the trace's sessions")] = False
    agents: AgentsPart = AgentsPart()


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. TOML sections have the same names as these fields."""

    model: ModelPart = ModelPart()
    fleet: FleetPart = FleetPart()
    kv: KVSettings = KVSettings(block_size=64)
    engine: EngineSettings = EngineSettings(max_num_seqs=256, max_num_batched_tokens=8192, max_waiting=100_000)
    workload: WorkloadPart = WorkloadPart()
    goals: Goals = Goals()
    seed: Annotated[int, Meta(ge=0, description="of all that is random")] = 0


def parse_scenario(text: str, where: str, sets: Iterable[str] = ()) -> Scenario:
    """Read a TOML document; `where` names it in errors, `sets` are `path=value` strings that overrule it. Settings left
    out keep this module's defaults, which for `[kv]` and `[engine]` suit accelerators: blocks of 64, 256 sequences,
    steps of 8,192 tokens. Raises `ConfigError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {where} is not valid TOML: {error}") from None
    for item in sets:
        _put(document, item)
    defaults = msgspec.to_builtins(Scenario())
    _check_names(document, defaults, where, "")
    for section in ("kv", "engine"):
        if isinstance(document.get(section), dict):
            document[section] = {**defaults[section], **document[section]}
    try:
        return msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario {where}: {error}") from None


def _put(document: dict[str, Any], item: str) -> None:
    """Lay one `a.b=c` over the document; the value is read as TOML where it is TOML."""
    path, eq, text = item.partition("=")
    if not eq:
        raise ConfigError(f"--set {item!r} needs the form path=value, for example --set fleet.workers=8")
    *sections, name = path.strip().split(".")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"--set {item!r}: {section} is no section")
    try:
        document[name] = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        document[name] = text.strip()


def _check_names(given: dict[str, Any], known: dict[str, Any], where: str, path: str) -> None:
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {path}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"scenario {where}: unknown setting {path}{name}{hint}")
        if isinstance(value, dict) and isinstance(known[name], dict):
            _check_names(value, known[name], where, f"{path}{name}.")


# ------------------------------------------------------------------ assembling


@dataclass(frozen=True)
class Simulation:
    """A scenario made ready to run, once."""

    scenario: Scenario
    sizes: PoolSizes
    loop: EventLoop
    cluster: Cluster
    recorder: Recorder

    def run(self, sessions: Iterable[Session]) -> Results:
        """Simulate the sessions, which come in the order of their arrivals."""
        self.cluster.run(sessions)
        return summarize(
            self.recorder.columns(),
            [worker.core.stats() for worker in self.cluster.workers],
            refused=dict(self.recorder.refused),
            busy_ns=[worker.busy_ns for worker in self.cluster.workers],
            goals=self.scenario.goals,
        )


def expert_ranks(fleet: FleetPart, facts: ModelFacts) -> int:
    """Accelerators over which the experts are spread: those of one rank at least. Raises `ConfigError` for a fleet that
    can't be cut like that."""
    if facts.full.num_heads % fleet.tp:
        raise ConfigError(f"fleet.tp = {fleet.tp} does not divide the {facts.full.num_heads} heads of {facts.name}")
    if facts.moe is None:
        return fleet.tp
    ep = max(fleet.ep, fleet.tp)
    if ep % fleet.tp:
        raise ConfigError(f"fleet.ep = {ep} must be a multiple of fleet.tp = {fleet.tp}")
    if fleet.workers % (ep // fleet.tp):
        raise ConfigError(
            f"fleet.workers = {fleet.workers} must be a multiple of the {ep // fleet.tp} ranks of a replica"
        )
    return ep


def pool_sizes(scenario: Scenario, facts: ModelFacts) -> PoolSizes:
    """Both pools of one accelerator of a worker, sized as the engine does. `kv.memory`, where it is set, is a size or a
    fraction of what weights and reserve leave. Raises `ConfigError` where the weights don't fit, or too little is left.
    """
    fleet, kv = scenario.fleet, scenario.kv
    hardware = HARDWARE.get(fleet.gpu)
    ep = expert_ranks(fleet, facts)
    weights = facts.resident_bytes(tp=fleet.tp, ep=ep)
    budget = int(hardware.memory_bytes * fleet.memory_share - fleet.reserve_gb * 1e9 - weights)
    if kv.memory != KVSettings().memory:
        memory = check_memory(kv.memory)
        budget = memory if isinstance(memory, int) else int(memory * max(0, budget))
    if budget <= 0:
        raise ConfigError(
            f"{facts.name} has {weights / 1e9:.1f} GB of weights on each {fleet.gpu} with tp = {fleet.tp} and ep = "
            f"{ep}, which leaves nothing for KV; raise fleet.tp or fleet.ep (`cygnet plan` says to what)"
        )
    return plan_pools(
        facts.kv_geometry(scenario.model.kv_bits // 8, fleet.tp),
        block_size=kv.block_size,
        budget_bytes=budget,
        chunk=scenario.engine.max_num_batched_tokens,
        model_max_len=facts.max_model_len,
        max_model_len=scenario.model.max_model_len,
        swa_share=kv.swa_share,
        session_tokens=kv.session_tokens,
        windows_per_session=kv.windows_per_session,
    )


def build(
    scenario: Scenario,
    facts: ModelFacts,
    *,
    cost: CostModel | None = None,
    sizes: PoolSizes | None = None,
    progress: Callable[[int], None] = lambda done: None,
    watch: Watch | None = None,
) -> Simulation:
    """Engines, clock and cluster of a scenario. `cost` and `sizes` stand in for what follows from the accelerator;
    `watch` sees every plan."""
    fleet, ep = scenario.fleet, expert_ranks(scenario.fleet, facts)
    kv_bytes = scenario.model.kv_bits // 8
    geometry = facts.kv_geometry(kv_bytes, fleet.tp)
    sizes = sizes or pool_sizes(scenario, facts)
    cost = cost or RooflineCost(facts, HARDWARE.get(fleet.gpu), tp=fleet.tp, ep=ep, kv_bytes=kv_bytes)
    loop, recorder = EventLoop(), Recorder()
    cluster = Cluster(loop, root_key(FINGERPRINT), dispatch=fleet.dispatch, recorder=recorder, progress=progress)
    for index in range(fleet.workers):
        manager = KVManager(geometry, sizes, _kv_policy(scenario, index))
        core = EngineCore(
            manager,
            _scheduler_policy(scenario),
            fingerprint=FINGERPRINT,
            vocab_size=MAX_TOKEN_ID,
            max_requests=scenario.engine.max_requests,
        )
        cluster.workers.append(SimWorker(core, cost, loop, cluster.take, cluster.refuse, watch=watch))
    return Simulation(scenario, sizes, loop, cluster, recorder)


def _kv_policy(scenario: Scenario, worker: int) -> KVPolicy:
    kv = scenario.kv
    return KVPolicy(
        prefix_cache=kv.prefix_cache,
        rebuild=kv.rebuild,
        retention=kv.retention,
        eviction=kv.eviction,
        seed=scenario.seed * 4096 + worker,
    )


def _scheduler_policy(scenario: Scenario) -> SchedulerPolicy:
    engine = scenario.engine
    return SchedulerPolicy(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        ageing_tokens_per_s=engine.ageing_tokens_per_s,
        share_in_flight=engine.share_in_flight,
    )
