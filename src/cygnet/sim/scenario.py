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

from cygnet.base.config import EngineSettings, KVSettings, check_host_cache, check_memory
from cygnet.base.errors import ConfigError
from cygnet.base.geometry import KVGeometry
from cygnet.base.registry import Registry
from cygnet.engine.core import EngineCore
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager, LowerTiers
from cygnet.kv.policy import KVPolicy, TierPolicy
from cygnet.kv.sizing import PoolSizes, plan_host, plan_pools
from cygnet.kv.store import namespace_of
from cygnet.kv.transfers import object_bytes
from cygnet.router.buckets import parse_buckets
from cygnet.router.config import CacheSettings, QueueSettings, RoutingSettings
from cygnet.sim.agents import AgentProfile, Spread
from cygnet.sim.cluster import MAX_TOKEN_ID, Cluster
from cygnet.sim.cost import CostModel, RooflineCost
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.hardware import HARDWARE, HardwareProfile
from cygnet.sim.model_facts import ModelFacts
from cygnet.sim.results import Goals, Recorder, Results, summarize
from cygnet.sim.router import Dispatch, Fixed, SimRouter
from cygnet.sim.sessions import Session
from cygnet.sim.store import SimStore, StoreLink
from cygnet.sim.worker import SimWorker, Watch

FINGERPRINT = "simulated"
MS = 1_000_000


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model."""

    name: Annotated[str, Meta(description="a model of `cygnet plan`, or the path of a config.json")] = "gemma-3-27b"
    kv_bits: Annotated[Literal[8, 16, 32], Meta(description="bits of a KV element")] = 16
    weight_bits: Annotated[float, Meta(ge=0, le=32, description="bits of a weight; 0: the checkpoint's")] = 0.0
    max_model_len: Annotated[int, Meta(ge=0, description="longest context served; 0: the model's")] = 0


class FleetPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers, all alike. A worker is one attention rank."""

    workers: Annotated[int, Meta(ge=1, le=4096, description="attention ranks, each with an engine of its own")] = 1
    gpu: Annotated[
        str,
        Meta(description="accelerator, as `cygnet plan` knows it; or a profile (.json) of `cygnet bench calibrate`"),
    ] = "H200"
    tp: Annotated[int, Meta(ge=1, description="accelerators per rank")] = 1
    ep: Annotated[int, Meta(ge=1, description="accelerators that share the experts, if any; tp or a multiple")] = 1
    dispatch: Annotated[
        str, Meta(description="which worker gets a request: session, round_robin, or router, as [routing] says")
    ] = "session"
    groups: Annotated[
        dict[str, int], Meta(description="workers per length bucket of routing.buckets; none: all take all lengths")
    ] = {}
    memory_share: Annotated[float, Meta(gt=0, le=1, description="of the accelerator's memory that may be used")] = 0.9
    reserve_gb: Annotated[float, Meta(ge=0, description="of that, for activations and graphs")] = 4.0


class StorePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store that all workers share, below their host memory."""

    capacity_gb: Annotated[float, Meta(ge=0, description="of all its servers; 0: no store")] = 0.0
    servers: Annotated[int, Meta(ge=1, le=4096, description="servers, over which keys are spread as in GCache")] = 1
    ttl_s: Annotated[float, Meta(ge=0, description="what is not used for so long is gone; 0: for ever")] = 0.0
    latency_us: Annotated[float, Meta(ge=0, description="of a lookup, a fetch or a put")] = 500.0
    bandwidth_gb_s: Annotated[float, Meta(gt=0, description="of a worker's way to it, each direction")] = 25.0


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker dies, and comes back with an empty cache."""

    worker: Annotated[int, Meta(ge=0, description="which, from 0")]
    at_s: Annotated[float, Meta(ge=0, description="when it dies")]
    for_s: Annotated[float, Meta(gt=0, description="how long it is away")]

    def covers(self, time_s: float) -> bool:
        """Whether the worker is away at `time_s`."""
        return self.at_s <= time_s <= self.at_s + self.for_s


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
    kv: KVSettings = KVSettings(block_size=64, host_cache="off")
    engine: EngineSettings = EngineSettings(max_num_seqs=256, max_num_batched_tokens=8192, max_waiting=100_000)
    store: StorePart = StorePart()
    routing: RoutingSettings = RoutingSettings()
    cache: CacheSettings = CacheSettings()
    queue: QueueSettings = QueueSettings()
    faults: tuple[Fault, ...] = ()
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
        if isinstance(value, dict) and isinstance(known[name], dict) and known[name]:  # else names are the user's
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
    store: SimStore | None = None

    def run(self, sessions: Iterable[Session]) -> Results:
        """Simulate the sessions, which come in the order of their arrivals."""
        self.cluster.run(sessions)
        return summarize(
            self.recorder.columns(),
            [stats for worker in self.cluster.workers for stats in (*worker.dead, worker.core.stats())],
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


def pool_sizes(scenario: Scenario, facts: ModelFacts, hardware: HardwareProfile | None = None) -> PoolSizes:
    """Both pools of one accelerator of a worker, sized as the engine does. `kv.memory`, where it is set, is a size or a
    fraction of what weights and reserve leave. Raises `ConfigError` where the weights don't fit, or too little is left.
    """
    fleet, kv = scenario.fleet, scenario.kv
    hardware = hardware or HARDWARE.get(fleet.gpu)
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
    hardware: HardwareProfile | None = None,
    cost: CostModel | None = None,
    sizes: PoolSizes | None = None,
    progress: Callable[[int], None] = lambda done: None,
    watch: Watch | None = None,
) -> Simulation:
    """Engines, clock and cluster of a scenario. `hardware` stands in for the accelerator that `fleet.gpu` names, `cost`
    and `sizes` for what follows from it; `watch` sees every plan."""
    fleet, ep = scenario.fleet, expert_ranks(scenario.fleet, facts)
    kv_bytes, hardware = scenario.model.kv_bits // 8, hardware or HARDWARE.get(fleet.gpu)
    geometry = facts.kv_geometry(kv_bytes, fleet.tp)
    sizes = sizes or pool_sizes(scenario, facts, hardware)
    cost = cost or RooflineCost(facts, hardware, tp=fleet.tp, ep=ep, kv_bytes=kv_bytes, block_size=sizes.block_size)
    lower = lower_tiers(scenario, geometry, sizes.block_size)
    store, link = _store(scenario, geometry, sizes.block_size), _link(scenario)
    loop, recorder = EventLoop(), Recorder()
    cluster = Cluster(loop, root_key(FINGERPRINT), recorder=recorder, progress=progress)

    def core(worker: int) -> EngineCore:
        return EngineCore(
            KVManager(geometry, sizes, _kv_policy(scenario, worker), lower=lower),
            _scheduler_policy(scenario),
            fingerprint=FINGERPRINT,
            vocab_size=MAX_TOKEN_ID,
            max_requests=scenario.engine.max_requests,
        )

    for index in range(fleet.workers):
        cluster.workers.append(
            SimWorker(core(index), cost, loop, cluster.take, cluster.refuse, watch=watch, store=store, link=link)
        )
    _groups(scenario)
    cluster.dispatch = DISPATCH.get(fleet.dispatch)(scenario, loop, cluster, sizes.block_size)
    for fault in scenario.faults:
        if any(f is not fault and f.worker == fault.worker and f.covers(fault.at_s) for f in scenario.faults):
            raise ConfigError(f"faults: worker {fault.worker} is to die at {fault.at_s:g} s, when it is away")
        _plan_fault(fault, loop, cluster, core)
    return Simulation(scenario, sizes, loop, cluster, recorder, store)


def lower_tiers(scenario: Scenario, geometry: KVGeometry, block_size: int) -> LowerTiers | None:
    """Host tier and store of one accelerator of a worker; `None` for none. Raises `ConfigError` for a host cache that
    is too small, and for a store without one."""
    kv = scenario.kv
    if kv.store:
        raise ConfigError(f"kv.store = {kv.store!r} opens a real store; a simulated one is described by [store]")
    if kv.host_cache == "auto":
        raise ConfigError("kv.host_cache = 'auto' asks a machine; write off, or a size per accelerator such as 64GiB")
    budget, stored = check_host_cache(kv.host_cache), scenario.store.capacity_gb > 0
    if stored and not budget:
        raise ConfigError("a store is reached through host memory; set kv.host_cache, such as 64GiB per accelerator")
    if not budget or not kv.prefix_cache:
        return None
    host = plan_host(
        geometry,
        block_size=block_size,
        budget_bytes=budget,
        swa_share=kv.swa_share,
        session_tokens=kv.session_tokens,
        windows_per_session=kv.windows_per_session,
    )
    policy = TierPolicy(
        write=kv.write_policy,
        write_hits=kv.write_hits,
        wait=kv.store_wait,
        timeout_ns=kv.store_timeout_ms * MS,
        timeout_ns_per_ki_token=kv.store_timeout_ms_per_1k * MS,
        keep_alive_ns=kv.store_keep_alive_s * 1000 * MS,
    )
    return LowerTiers(host, policy, namespace_of(FINGERPRINT, geometry, block_size, "simulated") if stored else None)


def _store(scenario: Scenario, geometry: KVGeometry, block_size: int) -> SimStore | None:
    """The store, in which a block's KV of all accelerators of a rank counts."""
    part = scenario.store
    if not part.capacity_gb:
        return None
    sizes = [object_bytes(group, block_size) * scenario.fleet.tp for group in (geometry.full, geometry.swa)]
    return SimStore(part.servers, int(part.capacity_gb * 1e9), int(part.ttl_s * 1e9), sizes)


def _link(scenario: Scenario) -> StoreLink:
    return StoreLink(round(scenario.store.latency_us * 1e3), scenario.store.bandwidth_gb_s * 1e9)


MakeDispatch = Callable[[Scenario, EventLoop, Cluster, int], Dispatch]
"""Given the block size last."""

DISPATCH: Registry[MakeDispatch] = Registry("dispatch")


@DISPATCH.register("session")
def _by_session(scenario: Scenario, loop: EventLoop, cluster: Cluster, block_size: int) -> Dispatch:
    return Fixed(scenario.fleet.workers, cluster.deliver, cluster.refuse, by_session=True)


@DISPATCH.register("round_robin")
def _in_turn(scenario: Scenario, loop: EventLoop, cluster: Cluster, block_size: int) -> Dispatch:
    return Fixed(scenario.fleet.workers, cluster.deliver, cluster.refuse, by_session=False)


@DISPATCH.register("router")
def _by_router(scenario: Scenario, loop: EventLoop, cluster: Cluster, block_size: int) -> Dispatch:
    return SimRouter(
        loop,
        _groups(scenario),
        block_size,
        cluster.deliver,
        cluster.refuse,
        routing=scenario.routing,
        cache=scenario.cache,
        queue=scenario.queue,
        seed=scenario.seed,
    )


def _groups(scenario: Scenario) -> list[str]:
    """Each worker's length bucket. Raises `ConfigError` for groups that are not those of the fleet or the router."""
    fleet = scenario.fleet
    groups = [group for group, count in fleet.groups.items() for _ in range(count)] or [""] * fleet.workers
    if len(groups) != fleet.workers:
        raise ConfigError(f"fleet.groups are {len(groups)} workers, and fleet.workers = {fleet.workers}")
    if fleet.groups and fleet.dispatch != "router":
        raise ConfigError(f"fleet.groups need fleet.dispatch = 'router'; it is {fleet.dispatch!r}")
    unknown = sorted(set(groups) - parse_buckets(scenario.routing.buckets).keys() - {""})
    if unknown:
        raise ConfigError(f"fleet.groups names {unknown[0]!r}, which is no bucket of routing.buckets")
    return groups


def _plan_fault(fault: Fault, loop: EventLoop, cluster: Cluster, core: Callable[[int], EngineCore]) -> None:
    worker = fault.worker
    if worker >= len(cluster.workers):
        raise ConfigError(f"faults: there is no worker {worker}; there are {len(cluster.workers)}, from 0")
    dies_ns, back_ns = round(fault.at_s * 1e9), round((fault.at_s + fault.for_s) * 1e9)
    loop.at(dies_ns, Priority.FAULT, lambda now_ns: cluster.fail(worker, core(worker)))
    loop.at(back_ns, Priority.FAULT, lambda now_ns: cluster.dispatch.up(worker))


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
