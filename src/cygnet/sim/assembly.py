"""From a scenario to engines, clock and cluster, ready to run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from cygnet.base.config import KVSettings, check_host_cache, check_memory
from cygnet.base.errors import ConfigError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.registry import Registry
from cygnet.engine.core import EngineCore
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager, LowerTiers
from cygnet.kv.policy import KVPolicy, TierPolicy
from cygnet.kv.sizing import HostSizes, PoolSizes, plan_host, plan_pools
from cygnet.kv.store import Namespace, namespace_of
from cygnet.kv.transfers import object_bytes
from cygnet.router.buckets import parse_buckets
from cygnet.sim.cluster import MAX_TOKEN_ID, Cluster
from cygnet.sim.cost import CostModel, RooflineCost
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.expert_load import ExpertBalance
from cygnet.sim.handover import Handover
from cygnet.sim.hardware import HARDWARE, HardwareProfile
from cygnet.sim.model_facts import ModelFacts
from cygnet.sim.results import Recorder, Results, summarize
from cygnet.sim.router import Dispatch, Fixed, SimRouter
from cygnet.sim.scenario import Fault, FleetPart, Scenario
from cygnet.sim.sessions import Session
from cygnet.sim.steps import Steps
from cygnet.sim.store import Servers, SimStore, StoreLink
from cygnet.sim.worker import SimWorker, Watch

FINGERPRINT = "simulated"
MS = 1_000_000
NEVER_NS = 1 << 60


@dataclass(frozen=True)
class Simulation:
    """A scenario made ready to run, once."""

    scenario: Scenario
    sizes: PoolSizes
    """Of the fleet's workers; those that decode may have others."""
    loop: EventLoop
    cluster: Cluster
    recorder: Recorder
    store: SimStore | None = None

    def run(self, sessions: Iterable[Session]) -> Results:
        """Simulate the sessions, which come in the order of their arrivals."""
        self.cluster.run(sessions)
        num_fleet = self.scenario.fleet.workers
        workers = self.cluster.workers
        steps = list({id(worker.steps): worker.steps for worker in workers}.values())
        fleet = {id(worker.steps): worker.steps for worker in workers[:num_fleet]}.values()
        stats = [[*worker.dead, worker.core.stats()] for worker in workers]
        return summarize(
            self.recorder.columns(),
            [one for each in stats[:num_fleet] for one in each],
            [one for each in stats[num_fleet:] for one in each],
            refused=dict(self.recorder.refused),
            busy_ns=[worker.busy_ns for worker in workers[:num_fleet]],
            decode_busy_ns=[worker.busy_ns for worker in workers[num_fleet:]],
            step_ns=sum(one.total_ns for one in fleet),
            waiting_share=sum(one.waiting_ns for one in steps) / max(1, sum(one.total_ns for one in steps)),
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


def kv_geometry(scenario: Scenario, facts: ModelFacts) -> KVGeometry:
    """The KV of one accelerator of the fleet. In one pool the sliding-window layers' KV is kept like that of the
    others; only its bytes per token count here."""
    geometry = facts.kv_geometry(scenario.model.kv_bits // 8, scenario.fleet.tp)
    if not scenario.model.one_pool or not geometry.has_swa:
        return geometry
    elements = geometry.uniform_token_bytes // geometry.full.dtype_bytes
    none = GroupGeometry(0, 0, 0, 0, geometry.full.dtype_bytes)
    return KVGeometry(full=GroupGeometry(1, 1, elements, 0, geometry.full.dtype_bytes), swa=none)


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
        kv_geometry(scenario, facts),
        block_size=kv.block_size,
        budget_bytes=budget,
        chunk=scenario.engine.max_num_batched_tokens,
        model_max_len=facts.max_model_len,
        max_model_len=scenario.model.max_model_len,
        swa_share=kv.swa_share,
        session_tokens=kv.session_tokens,
        windows_per_session=kv.windows_per_session,
    )


class _Builder:
    """Makes workers of one kind: those of the fleet, or those that decode for it, described as a fleet of their own."""

    def __init__(
        self, scenario: Scenario, facts: ModelFacts, hardware: HardwareProfile, cost: CostModel | None,
        sizes: PoolSizes | None,
    ) -> None:  # fmt: skip
        fleet = scenario.fleet
        self.scenario, self.geometry = scenario, kv_geometry(scenario, facts)
        self.ep = expert_ranks(fleet, facts)
        self.sizes = sizes or pool_sizes(scenario, facts, hardware)
        self.cost = cost or RooflineCost(
            facts,
            hardware,
            tp=fleet.tp,
            ep=self.ep,
            kv_bytes=scenario.model.kv_bits // 8,
            balance=ExpertBalance(fleet.expert_balance, fleet.expert_balance_ep),
            block_size=self.sizes.block_size,
            geometry=self.geometry,
        )
        self.lower: LowerTiers | None = None
        self.store: Servers | None = None
        self.link: StoreLink | None = None

    @property
    def object_bytes(self) -> list[int]:
        """Bytes of a block of each group, on all accelerators of a rank."""
        groups = (self.geometry.full, self.geometry.swa)
        return [object_bytes(group, self.sizes.block_size) * self.scenario.fleet.tp for group in groups]

    @property
    def namespace(self) -> Namespace:
        return namespace_of(FINGERPRINT, self.geometry, self.sizes.block_size, "simulated")

    @property
    def ranks_together(self) -> int:
        """Workers that wait for one another."""
        return self.ep // self.scenario.fleet.tp if self.scenario.fleet.sync else 1

    def core(self, worker: int) -> EngineCore:
        scenario = self.scenario
        return EngineCore(
            KVManager(self.geometry, self.sizes, _kv_policy(scenario, worker), lower=self.lower),
            _scheduler_policy(scenario),
            fingerprint=FINGERPRINT,
            vocab_size=MAX_TOKEN_ID,
            max_requests=scenario.engine.max_requests,
        )

    def add_workers(self, cluster: Cluster, loop: EventLoop, watch: Watch | None) -> None:
        for index in range(self.scenario.fleet.workers):
            if index % self.ranks_together == 0:
                steps = Steps(self.cost, loop)
            core = self.core(len(cluster.workers))
            cluster.workers.append(
                SimWorker(
                    core, steps, loop, cluster.take, cluster.refuse, watch=watch, store=self.store, link=self.link
                )
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
    hardware = hardware or HARDWARE.get(scenario.fleet.gpu)
    if scenario.fleet.expert_balance_ep == 1:
        raise ConfigError("fleet.expert_balance_ep = 1: one accelerator has all experts; write 0, or 2 and more")
    fleet = _Builder(scenario, facts, hardware, cost, sizes)
    store = _store(scenario, fleet.object_bytes)
    fleet.lower, fleet.store, fleet.link = lower_tiers(scenario, fleet), store, _link(scenario)
    loop, recorder = EventLoop(), Recorder()
    handover = None
    if scenario.decode.workers:
        decoding = _Builder(_as_fleet(scenario), facts, hardware, cost, sizes)
        handover = Handover(decoding.namespace, decoding.object_bytes, decoding.geometry, decoding.sizes.block_size)
        decoding.lower, decoding.store = _waiting_room(scenario, decoding), handover
        decoding.link = StoreLink(round(scenario.decode.latency_us * 1e3), scenario.decode.bandwidth_gb_s * 1e9)
    cluster = Cluster(loop, root_key(FINGERPRINT), recorder=recorder, progress=progress, handover=handover)
    fleet.add_workers(cluster, loop, watch)
    if handover is not None:
        decoding.add_workers(cluster, loop, watch)
    _groups(scenario)
    cluster.dispatch = DISPATCH.get(scenario.fleet.dispatch)(scenario, loop, cluster, fleet.sizes.block_size)
    _plan_faults(scenario, fleet, loop, cluster)
    return Simulation(scenario, fleet.sizes, loop, cluster, recorder, store)


# ----------------------------------------------------------------- lower tiers


def lower_tiers(scenario: Scenario, fleet: _Builder) -> LowerTiers | None:
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
    policy = TierPolicy(
        write=kv.write_policy,
        write_hits=kv.write_hits,
        wait=kv.store_wait,
        timeout_ns=kv.store_timeout_ms * MS,
        timeout_ns_per_ki_token=kv.store_timeout_ms_per_1k * MS,
        keep_alive_ns=kv.store_keep_alive_s * 1000 * MS,
    )
    return LowerTiers(_host(scenario, fleet, budget), policy, fleet.namespace if stored else None)


def _host(scenario: Scenario, fleet: _Builder, budget: int) -> HostSizes:
    kv = scenario.kv
    return plan_host(
        fleet.geometry,
        block_size=fleet.sizes.block_size,
        budget_bytes=budget,
        swa_share=kv.swa_share,
        session_tokens=kv.session_tokens,
        windows_per_session=kv.windows_per_session,
    )


def _as_fleet(scenario: Scenario) -> Scenario:
    """The workers that decode, as a fleet. Raises `ConfigError` for settings that they can't have."""
    part, fleet = scenario.decode, scenario.fleet
    if not scenario.kv.prefix_cache:
        raise ConfigError("decode.workers take over KV by its prefix; kv.prefix_cache = false leaves them none")
    alike = {"workers": part.workers, "tp": part.tp or fleet.tp, "ep": part.ep or fleet.ep}
    memory = part.memory or scenario.kv.memory
    return replace(scenario, fleet=replace(fleet, **alike), kv=replace(scenario.kv, memory=memory))


def _waiting_room(scenario: Scenario, decoding: _Builder) -> LowerTiers:
    """Host memory of a worker that decodes: what was handed over waits there, and nothing is copied down to it."""
    budget = check_host_cache(scenario.decode.host_cache)
    if not budget:
        raise ConfigError("decode.host_cache is where KV from prefill workers arrives; give a size, such as 64GB")
    policy = TierPolicy(write="selective", write_hits=1 << 60, wait="wait", min_fetch_tokens=1, keep_alive_ns=NEVER_NS)
    return LowerTiers(_host(decoding.scenario, decoding, budget), policy, decoding.namespace)


def _store(scenario: Scenario, sizes: list[int]) -> SimStore | None:
    """The store; `sizes` are the bytes of a block's KV on all accelerators of a rank."""
    part = scenario.store
    if not part.capacity_gb:
        return None
    return SimStore(part.servers, int(part.capacity_gb * 1e9), int(part.ttl_s * 1e9), sizes)


def _link(scenario: Scenario) -> StoreLink:
    return StoreLink(round(scenario.store.latency_us * 1e3), scenario.store.bandwidth_gb_s * 1e9)


# -------------------------------------------------------------------- dispatch

MakeDispatch = Callable[[Scenario, EventLoop, Cluster, int], Dispatch]
"""Given the block size last."""

DISPATCH: Registry[MakeDispatch] = Registry("dispatch")


@DISPATCH.register("session")
def _by_session(scenario: Scenario, loop: EventLoop, cluster: Cluster, block_size: int) -> Dispatch:
    return _fixed(scenario, cluster, by_session=True)


@DISPATCH.register("round_robin")
def _in_turn(scenario: Scenario, loop: EventLoop, cluster: Cluster, block_size: int) -> Dispatch:
    return _fixed(scenario, cluster, by_session=False)


def _fixed(scenario: Scenario, cluster: Cluster, *, by_session: bool) -> Dispatch:
    return Fixed(
        scenario.fleet.workers,
        cluster.deliver,
        cluster.refuse,
        by_session=by_session,
        num_decoding=scenario.decode.workers,
    )


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
        num_decoding=scenario.decode.workers,
        decode_policy=scenario.decode.policy,
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


# ---------------------------------------------------------------------- faults


def _plan_faults(scenario: Scenario, fleet: _Builder, loop: EventLoop, cluster: Cluster) -> None:
    """A rank takes down those that wait for it: its experts are missing to them."""
    together = fleet.ranks_together
    for fault in scenario.faults:
        if fault.worker >= scenario.fleet.workers:
            last = scenario.fleet.workers - 1
            raise ConfigError(f"faults: there is no worker {fault.worker}; those of the fleet are 0 to {last}")
        for other in scenario.faults:
            same = other is not fault and other.worker // together == fault.worker // together
            if same and other.covers(fault.at_s):
                raise ConfigError(f"faults: worker {fault.worker} is to die at {fault.at_s:g} s, when it is away")
        first = fault.worker // together * together
        _plan_fault(fault, range(first, first + together), fleet, loop, cluster)


def _plan_fault(fault: Fault, workers: range, fleet: _Builder, loop: EventLoop, cluster: Cluster) -> None:
    def fail(now_ns: int) -> None:
        cluster.fail({worker: fleet.core(worker) for worker in workers})

    def back(now_ns: int) -> None:
        for worker in workers:
            cluster.dispatch.up(worker)

    loop.at(round(fault.at_s * 1e9), Priority.FAULT, fail)
    loop.at(round((fault.at_s + fault.for_s) * 1e9), Priority.FAULT, back)


# -------------------------------------------------------------------- policies


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
