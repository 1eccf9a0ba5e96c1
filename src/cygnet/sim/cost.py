"""How long a step takes: a roofline per kind of layer.

    time = sum over kinds of layers x max(FLOPs / rate, bytes / bandwidth) + collectives + overhead

A kind is bound by whichever of the two takes longer; where a machine does not do both at once (`overlap` below 1), part
of the shorter is added. What is summed is one accelerator's share of one attention rank.

Data-parallel ranks share their experts. Ranks that step together (`together`) wait for one another in every layer:

    rank 0   attention, projections of a layer ████████│ experts of all ranks' tokens ████│ next layer
    rank 1   ███ waits                                 │                              ████│
    time     layers of a group x the slowest rank's    + experts + the way to them and back

The step of one rank alone (`step_ns`) takes the other ranks of its replica to run as many tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cygnet.base.geometry import KVGeometry
from cygnet.engine.plan import StepPlan
from cygnet.kv.transfers import Copies, StepTransfers
from cygnet.sim.expert_load import ExpertBalance
from cygnet.sim.hardware import HardwareProfile
from cygnet.sim.model_facts import AttentionFacts, ModelFacts, attended_pairs

T = TypeVar("T")


class CostModel(Protocol):
    """Says how long a plan's forward pass takes."""

    def step_ns(self, plan: StepPlan) -> int:
        """Whole nanoseconds, at least 1. The same plan always takes as long."""

    def repeats_ns(self, plan: StepPlan, count: int) -> Sequence[int]:
        """The time of each of the `count` steps after `plan`, of decodes alone, that are the same one token further."""

    def together(self, plans: Sequence[StepPlan], num_ranks: int, count: int) -> "SharedStep":
        """The step of ranks that wait for one another, `plans` of those of the `num_ranks` that have something to do,
        and of the `count` steps after it that are the same, decodes one token further."""


@dataclass(frozen=True)
class SharedStep:
    """What a step of several ranks takes."""

    times_ns: Sequence[int]
    """Of the step, and of those that repeat it."""
    waiting_ns: int
    """What all ranks together wait for slower ones in the first of them; ranks with nothing to do wait all the time
    that others compute alone."""


@dataclass(frozen=True)
class LinearCost:
    """A fixed time per step and per token: for what is to be computed by hand."""

    per_step_ns: int
    per_token_ns: int = 0

    def step_ns(self, plan: StepPlan) -> int:
        return self.per_step_ns + self.per_token_ns * plan.num_tokens

    def repeats_ns(self, plan: StepPlan, count: int) -> Sequence[int]:
        return [self.step_ns(plan)] * count

    def together(self, plans: Sequence[StepPlan], num_ranks: int, count: int) -> SharedStep:
        times = [self.step_ns(plan) for plan in plans]
        return SharedStep([max(times)] * (count + 1), num_ranks * max(times) - sum(times))


@dataclass(frozen=True)
class Load:
    """What a step is to do, as far as its time depends on it."""

    tokens: int
    """Through all layers."""
    sampled: int
    """Whose logits are needed."""
    requests: tuple[tuple[int, int], ...]
    """Start and number of tokens of each request."""

    @classmethod
    def of(cls, plan: StepPlan) -> "Load":
        requests = tuple((request.start, request.num_tokens) for request in plan.requests)
        sampled = sum(request.sample for request in plan.requests)
        return cls(sum(count for _, count in requests), sampled, requests)


MOST_KNOWN = 1 << 16
"""Batch sizes whose time is remembered."""


class _Group:
    """One group's attention on one rank: FLOPs and bytes as factors of pairs and tokens read."""

    def __init__(self, facts: AttentionFacts, kv_bytes: int, tp: int) -> None:
        self.layers = facts.num_layers
        self.limit = facts.limit
        self.window = facts.window
        self.index = facts.index
        heads = facts.num_heads / tp * 2
        self.prefill_flops = heads * (facts.score_dim + facts.mix_dim)
        self.decode_flops = heads * (facts.decode_score_dim + facts.decode_mix_dim)
        geometry = facts.geometry(kv_bytes, tp)
        self.token_bytes = geometry.token_bytes / max(1, geometry.num_layers)
        self.index_bytes = self.index_flops = 0.0
        if facts.index:
            self.index_bytes = self.token_bytes * facts.index.dim / facts.key_dim
            self.token_bytes -= self.index_bytes
            self.index_flops = 2.0 * facts.index.num_heads * facts.index.dim / tp

    def work(self, requests: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        """FLOPs and bytes of one layer."""
        decode_pairs = prefill_pairs = read = all_pairs = all_read = 0
        limit = self.limit
        for start, count in requests:
            end = start + count
            if count == 1:
                seen = end if limit is None or end < limit else limit
                decode_pairs += seen
                read += seen
            else:
                prefill_pairs += attended_pairs(start, count, limit)
                # A chunk of a sparse model reads what any of its queries chose: nearly all of it.
                read += end if self.window is None else min(end, count + self.window)
            all_read += end
            if self.index:
                all_pairs += attended_pairs(start, count)
        flops = decode_pairs * self.decode_flops + prefill_pairs * self.prefill_flops + all_pairs * self.index_flops
        return flops, read * self.token_bytes + all_read * self.index_bytes

    def decode_work(self, ends: "NDArray[np.int64]", steps: "NDArray[np.int64]") -> tuple[Any, Any]:
        """`work` of one token of each request, of `ends + step` tokens, for each step; numbers where it is always the
        same."""
        every = ends.sum() + len(ends) * steps
        seen = every if self.limit is None else self._seen(ends, steps, self.limit)
        flops, read = seen * self.decode_flops, seen * self.token_bytes
        return (flops + every * self.index_flops, read + every * self.index_bytes) if self.index else (flops, read)

    @staticmethod
    def _seen(ends: "NDArray[np.int64]", steps: "NDArray[np.int64]", limit: int) -> Any:
        """Keys within reach of all requests, for each step; one number where every request has as many as can be."""
        below = ends[ends < limit]
        rest = (len(ends) - len(below)) * limit
        return np.minimum(below[:, None] + steps, limit).sum(axis=0) + rest if len(below) else rest


class RooflineCost:
    """Steps of attention ranks of `tp` accelerators each, whose experts are spread over `ep`."""

    def __init__(
        self,
        facts: ModelFacts,
        hardware: HardwareProfile,
        *,
        tp: int = 1,
        ep: int = 1,
        kv_bytes: int = 2,
        balance: ExpertBalance | None = None,
        block_size: int = 0,
        geometry: KVGeometry | None = None,
    ) -> None:
        """`block_size` is needed where plans have transfers between device and host; `geometry` where blocks are not
        shaped as the model has them."""
        self._facts, self._hardware = facts, hardware
        self._tp, self._ep, self._balance = tp, max(ep, tp) if facts.moe else tp, balance or ExpertBalance()
        self._groups = [_Group(group, kv_bytes, tp) for group in facts.groups]
        geometry = geometry or facts.kv_geometry(kv_bytes, tp)
        self._full_bytes, self._swa_bytes = geometry.full.block_bytes(block_size), geometry.swa.block_bytes(block_size)
        self._known: dict[tuple[int, int, int], float] = {}
        self._known_own: dict[tuple[int, int, int], float] = {}
        self._known_shared: dict[tuple[int, int], float] = {}
        self._exposed = 1.0 - hardware.overlap
        weights = facts.weight_bytes
        self._flops_16 = hardware.flops_16bit * hardware.flops_efficiency
        self._flops_8 = hardware.flops_8bit * hardware.flops_efficiency
        self._attention_rate = hardware.flops_16bit * hardware.attention_efficiency
        self._bandwidth = hardware.memory_bandwidth * hardware.bandwidth_efficiency
        self._kv_bandwidth = hardware.memory_bandwidth * hardware.kv_efficiency
        self._products = [
            (group.num_layers, parameters / tp, each)
            for group in facts.groups
            for parameters, each in (
                (group.parameters_in, weights.attention_in),
                (group.parameters_out, weights.attention_out),
            )
        ]
        if facts.dense_layers:
            self._products.append((facts.dense_layers, facts.dense_parameters / tp, weights.mlp))
        if facts.moe and facts.moe.shared_parameters:
            self._products.append((facts.moe.num_layers, facts.moe.shared_parameters / tp, weights.mlp))

    def step_ns(self, plan: StepPlan) -> int:
        compute_ns = self.load_ns(Load.of(plan)) if plan.requests else round(self._hardware.step_overhead_ns)
        return self._with_transfers(compute_ns, plan.transfers) if plan.transfers else compute_ns

    def _with_transfers(self, compute_ns: int, *transfers: StepTransfers) -> int:
        """What is evicted goes first; loads, layer by layer, and saves go beside the step, and the first layer waits
        for its load. Of several ranks' copies the longest count."""
        evicted = max(self._copy_ns(one.evicted) for one in transfers)
        loads = max(self._copy_ns(one.loads) for one in transfers)
        saves = max(self._copy_ns(one.saves) for one in transfers)
        return evicted + max(compute_ns + loads // self._facts.num_layers, loads, saves)

    def _copy_ns(self, copies: Copies) -> int:
        moved = len(copies.full) * self._full_bytes + len(copies.swa) * self._swa_bytes
        return math.ceil(moved / (self._hardware.host_bandwidth * self._hardware.host_efficiency) * 1e9)

    def load_ns(self, load: Load) -> int:
        """The time of a step that does `load`."""
        return max(1, math.ceil((self._attention(load) + self._rest(load)) * 1e9))

    def repeats_ns(self, plan: StepPlan, count: int) -> Sequence[int]:
        load = Load.of(plan)
        attention = np.zeros(count)
        for group, layer in zip(self._groups, self._decode_layers(load, count), strict=True):
            attention += group.layers * layer
        nanoseconds: list[int] = np.ceil((attention + self._rest(load)) * 1e9).astype(np.int64).tolist()
        return nanoseconds

    def _decode_layers(self, load: Load, count: int) -> list[Any]:
        """Seconds of one layer's attention of each group, in each of the `count` decode steps after `load`; a number
        where it is always the same."""
        ends = np.array([start + 1 for start, _ in load.requests])
        steps = np.arange(1, count + 1)
        layers = []
        for group in self._groups:
            flops, read = group.decode_work(ends, steps)
            computing, reading = flops / self._attention_rate, read / self._kv_bandwidth
            if isinstance(computing, float):
                layers.append(self._both(computing, reading))
                continue
            layers.append(np.maximum(computing, reading) + self._exposed * np.minimum(computing, reading))
        return layers

    # ------------------------------------------------------------ several ranks

    def together(self, plans: Sequence[StepPlan], num_ranks: int, count: int) -> SharedStep:
        """See `CostModel`. What a rank does by itself beside attention is the same in each of its layers."""
        transfers = [plan.transfers for plan in plans if plan.transfers]
        loads = [Load.of(plan) for plan in plans if plan.requests]
        if not loads:
            overhead_ns = round(self._hardware.step_overhead_ns)
            return SharedStep([self._with_transfers(overhead_ns, *transfers) if transfers else overhead_ns], 0)
        shared = self._shared(sum(load.tokens for load in loads), max(load.tokens for load in loads))
        own = [self._own(load) for load in loads]
        each = [seconds / self._facts.num_layers for seconds in own]
        alone, longest = sum(own), 0.0
        for group in self._groups:
            layers = [self._layer(group, load) for load in loads]
            alone += group.layers * sum(layers)
            longest += group.layers * max(map(add, layers, each))
        first_ns = max(1, math.ceil((longest + shared) * 1e9))
        if transfers:
            first_ns = self._with_transfers(first_ns, *transfers)
        times_ns = [first_ns]
        if count:
            seconds = np.zeros(count)
            for group, *layers in zip(self._groups, *(self._decode_layers(load, count) for load in loads), strict=True):
                slowest = layers[0] + each[0]
                for layer, rest in zip(layers[1:], each[1:], strict=True):
                    slowest = np.maximum(slowest, layer + rest)
                seconds += group.layers * slowest
            times_ns += np.ceil((seconds + shared) * 1e9).astype(np.int64).tolist()
        return SharedStep(times_ns, math.ceil(max(0.0, num_ranks * longest - alone) * 1e9))

    def _own(self, load: Load) -> float:
        """Seconds of what a rank does by itself beside attention."""
        size = load.tokens, load.sampled, len(load.requests)
        known = self._known_own.get(size)
        if known is None:
            parts = self._own_parts(load)
            known = _remember(self._known_own, size, sum(parts.values()))
        return known

    def _shared(self, tokens: int, most: int) -> float:
        """Seconds of the experts and the way to them and back, for `tokens` of all ranks, `most` of one."""
        known = self._known_shared.get((tokens, most))
        if known is None:
            known = _remember(self._known_shared, (tokens, most), sum(self._shared_parts(tokens, most).values()))
        return known

    # ------------------------------------------------------------------- parts

    def _layer(self, group: _Group, load: Load) -> float:
        """Seconds of one layer's attention."""
        flops, read = group.work(load.requests)
        return self._both(flops / self._attention_rate, read / self._kv_bandwidth)

    def _attention(self, load: Load) -> float:
        seconds = 0.0
        for group in self._groups:
            seconds += group.layers * self._layer(group, load)
        return seconds

    def _rest(self, load: Load) -> float:
        """Seconds of all but attention, which depend on how many tokens there are and not on where."""
        size = load.tokens, load.sampled, len(load.requests)
        known = self._known.get(size)
        if known is None:
            known = _remember(self._known, size, sum(self._parts_by_tokens(load).values()))
        return known

    def _both(self, computing: float, reading: float) -> float:
        """Seconds of computing and reading side by side, as far as they go so."""
        return max(computing, reading) + self._exposed * min(computing, reading)

    def parts(self, load: Load) -> dict[str, float]:
        """Seconds by what they are spent on."""
        return {"attention": self._attention(load), **self._parts_by_tokens(load)}

    def _parts_by_tokens(self, load: Load) -> dict[str, float]:
        """All but attention, the other ranks of the replica running as many tokens."""
        own, shared = self._own_parts(load), self._shared_parts(load.tokens * self._ep // self._tp, load.tokens)
        collectives = own.pop("all-reduces") + shared.pop("all-to-alls")
        return {**own, **shared, "collectives": collectives}

    def _own_parts(self, load: Load) -> dict[str, float]:
        facts, hardware, tokens = self._facts, self._hardware, load.tokens
        products = sum(layers * self._product(tokens, parameters, each) for layers, parameters, each in self._products)
        head = facts.vocab_size * facts.hidden_size / self._tp
        sampled = self._product(load.sampled, head, facts.weight_bytes.embedding) if load.sampled else 0.0
        overhead_ns = hardware.step_overhead_ns + len(load.requests) * hardware.request_overhead_ns
        return {
            "projections and dense MLPs": products,
            "head": sampled / hardware.head_speed,
            "all-reduces": self._all_reduces(tokens),
            "overhead": overhead_ns / 1e9,
        }

    def _product(self, tokens: float, parameters: float, each: float) -> float:
        rate = self._flops_8 if each <= 1.0 else self._flops_16
        return self._both(2.0 * tokens * parameters / rate, parameters * each / self._bandwidth)

    def _all_reduces(self, tokens: int) -> float:
        """Two in each layer, where it is split over `tp`."""
        if self._tp == 1:
            return 0.0
        facts, hardware = self._facts, self._hardware
        moved = 2 * (self._tp - 1) / self._tp * tokens * facts.hidden_size * 2
        seconds = moved / (hardware.link_bandwidth * hardware.link_efficiency) + hardware.collective_ns / 1e9
        return 2 * facts.num_layers * seconds

    def _shared_parts(self, tokens: int, most: int) -> dict[str, float]:
        """Experts, and the way to them and back (8 and 16 bits), for `tokens` of all ranks, of which one has `most`.

        Both wait for the most loaded accelerator; the way also for the rank that sends most.
        """
        facts, hardware, moe = self._facts, self._hardware, self._facts.moe
        if moe is None:
            return {"experts": 0.0, "all-to-alls": 0.0}
        each = facts.weight_bytes.experts
        rate = self._flops_8 if each <= 1.0 else self._flops_16
        busiest = tokens / self._ep * self._balance.imbalance(moe, self._ep, tokens)
        flops = 2.0 * busiest * moe.top_k * moe.expert_parameters
        touched = moe.num_experts / self._ep * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens)
        reading = touched * moe.expert_parameters * each / self._bandwidth
        experts = moe.num_layers * self._both(flops / rate, reading)
        if self._ep == self._tp:
            return {"experts": experts, "all-to-alls": 0.0}
        inside = self._ep <= hardware.per_node
        link = (hardware.link_bandwidth if inside else hardware.network_bandwidth) * hardware.link_efficiency
        moved = max(most / self._tp, busiest) * moe.top_k * facts.hidden_size * 3 * (1 - 1 / self._ep)
        return {"experts": experts, "all-to-alls": moe.num_layers * (moved / link + 2 * hardware.collective_ns / 1e9)}


def _remember(known: dict[T, float], key: T, value: float) -> float:
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = value
    return value
