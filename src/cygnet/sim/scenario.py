"""A scenario: which model on which accelerators, with which settings, asked what. Read from TOML.

`[kv]` and `[engine]` are those of `cygnet serve`, so that a scenario and a server say the same in the same words.
"""

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cygnet.base.config import EngineSettings, KVSettings
from cygnet.base.errors import ConfigError
from cygnet.router.config import CacheSettings, QueueSettings, RoutingSettings
from cygnet.sim.agents import AgentProfile, Spread
from cygnet.sim.expert_load import BALANCE
from cygnet.sim.results import Goals


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model."""

    name: Annotated[str, Meta(description="a model of `cygnet plan`, or the path of a config.json")] = "gemma-3-27b"
    kv_bits: Annotated[Literal[8, 16, 32], Meta(description="bits of a KV element")] = 16
    weight_bits: Annotated[float, Meta(ge=0, le=32, description="bits of a weight; 0: the checkpoint's")] = 0.0
    max_model_len: Annotated[int, Meta(ge=0, description="longest context served; 0: the model's")] = 0
    one_pool: Annotated[
        bool, Meta(description="keep sliding-window KV for every token, as engines without a pool of its own do")
    ] = False


class FleetPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers, all alike (but for `[decode]`). A worker is one attention rank."""

    workers: Annotated[int, Meta(ge=1, le=4096, description="attention ranks, each with an engine of its own")] = 1
    gpu: Annotated[
        str,
        Meta(description="accelerator, as `cygnet plan` knows it; or a profile (.json) of `cygnet bench calibrate`"),
    ] = "H200"
    tp: Annotated[int, Meta(ge=1, description="accelerators per rank")] = 1
    ep: Annotated[int, Meta(ge=1, description="accelerators that share the experts, if any; tp or a multiple")] = 1
    sync: Annotated[
        bool, Meta(description="ranks that share experts wait for one another in every layer (DP attention)")
    ] = True
    expert_balance: Annotated[
        float, Meta(gt=0, le=1, description="mean over largest load of the accelerators that share experts")
    ] = BALANCE
    expert_balance_ep: Annotated[
        int, Meta(ge=0, description="accelerators on which that was measured; 0: as many as ep")
    ] = 0
    dispatch: Annotated[
        str, Meta(description="which worker gets a request: session, round_robin, or router, as [routing] says")
    ] = "session"
    groups: Annotated[
        dict[str, int], Meta(description="workers per length bucket of routing.buckets; none: all take all lengths")
    ] = {}
    memory_share: Annotated[float, Meta(gt=0, le=1, description="of the accelerator's memory that may be used")] = 0.9
    reserve_gb: Annotated[float, Meta(ge=0, description="of that, for activations and graphs")] = 4.0


class DecodePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers that only decode; where there are any, the fleet's only prefill, and hand over the KV."""

    workers: Annotated[int, Meta(ge=0, le=4096, description="attention ranks that decode; 0: the fleet does both")] = 0
    tp: Annotated[int, Meta(ge=0, description="accelerators per rank; 0: the fleet's")] = 0
    ep: Annotated[int, Meta(ge=0, description="accelerators that share the experts; 0: the fleet's")] = 0
    memory: Annotated[str, Meta(description="KV per accelerator, as kv.memory; empty: the same")] = ""
    policy: Annotated[str, Meta(description="of the router, where fleet.dispatch is router")] = "least_loaded"
    host_cache: Annotated[
        str, Meta(description="host memory per accelerator in which KV waits for room on the device")
    ] = "64GB"
    latency_us: Annotated[float, Meta(ge=0, description="of a question, or a piece of KV, to prefill workers")] = 50.0
    bandwidth_gb_s: Annotated[float, Meta(gt=0, description="of a decode worker's way from them")] = 50.0


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
    decode: DecodePart = DecodePart()
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
