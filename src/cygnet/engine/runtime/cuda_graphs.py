"""Decode steps replayed as CUDA graphs: one launch instead of one per kernel.

A graph replays fixed launches on fixed addresses, so a step's inputs are copied into static buffers, and a batch is
padded to a captured size (`graph_buckets`). Padding rows are requests of one token each, at position 0, in a *scratch
block* that no request owns: they compute and write like the others, and harm nobody.

    static rows    0 ... n-1 | n ... bucket-1
                   requests  | token 0 at position 0, written to the scratch block's first slot

What changes between steps on the host alone (lengths, floors) reaches the kernels through the attention backend's
static plans. Capturing needs a backend with those: `GraphAttentionBackend`.

`graph_setup` decides whether the engine uses graphs, and for which batches.

**Not run on a GPU.** The logic is tested on the CPU with a device that keeps a graph's contract.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cygnet.engine.graph_buckets import Buckets, GraphMemory
from cygnet.model.attention.backend import GraphAttentionBackend
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.decoder import HybridModel, Plans
from cygnet.model.description import GroupName, ModelDescription

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and libraries set up on first use, which can't be captured."""
BYTES_PER_LAUNCH = 4096
"""Device memory of one launch in a graph; a guess."""
LAUNCHES_PER_LAYER = 16
"""A guess, from counting the kernels of a layer."""
INPUTS_PER_ROW, INT_BYTES = 4, 8
"""Static integers of a request besides its block tables: token, position, and a slot per group."""


class Graph(Protocol):
    """Something captured."""

    def replay(self) -> None:
        """Do again what was captured: same launches, same addresses, whatever the memory holds by now."""


class GraphDevice(Protocol):
    """Captures steps. Graphs of one device share a memory pool: a result is valid until any of them replays."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """The graph of `step`, and its result, which every replay overwrites in place.

        `step` is run more than once, and its host code never again afterwards; it must not wait for the device.
        """


class CudaGraphDevice:
    """The real one. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = step()
        return graph, result


@dataclass(frozen=True)
class GroupLayout:
    """How wide a group's block table can get, and where its padding rows live."""

    layers: list[LayerKV]
    max_blocks: int
    scratch_block: int
    """A block of `layers` that the KV manager never hands out."""


def estimate_memory(description: ModelDescription, dtype_bytes: int, *, table_blocks: int = 0) -> GraphMemory:
    """Cost of graphs: the pool's from above (as if a layer freed nothing before its end), the records' guessed, the
    inputs' exact. `table_blocks` is the width of the block tables of all groups together."""
    widest = 0
    for layer in description.layers:
        a, mlp = layer.attention, layer.mlp
        qkv = (a.num_heads + a.num_kv_heads) * a.key_dim + a.num_kv_heads * a.value_dim
        copies = getattr(mlp, "top_k", 1)
        hidden = copies * (3 * mlp.intermediate_size + description.hidden_size)
        widest = max(widest, 2 * qkv + a.num_heads * a.value_dim + hidden + 4 * description.hidden_size)
    launches = LAUNCHES_PER_LAYER * len(description.layers)
    return GraphMemory(widest * dtype_bytes, launches * BYTES_PER_LAUNCH, (INPUTS_PER_ROW + table_blocks) * INT_BYTES)


class StaticInputs:
    """Buffers that captured steps read, sized for the largest bucket; smaller ones use their first rows."""

    def __init__(
        self, max_rows: int, block_size: int, groups: Mapping[GroupName, GroupLayout], device: torch.device
    ) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._block_size = block_size
        self._layouts = groups
        self._token_ids, self._positions = integers(max_rows), integers(max_rows)
        self._tables = {name: integers(max_rows, layout.max_blocks) for name, layout in groups.items()}
        self._slots = {name: integers(max_rows) for name in groups}
        for name in groups:
            self._pad(name, 0)

    def view(self, rows: int) -> ForwardBatch:
        """The first rows as a batch. Its tensors are the buffers, its lists those of padding rows only."""
        return self._batch(
            rows,
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            seq_lens=[1] * rows,
            groups={
                name: GroupBatch(self._tables[name][:rows], [0] * rows, [0] * rows, self._slots[name][:rows], g.layers)
                for name, g in self._layouts.items()
            },
        )

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the batch is one token per request, and its block tables fit."""
        return batch.num_tokens == batch.num_requests == len(set(batch.query_start)) - 1 and all(
            group_of(batch, name).block_table.shape[1] <= layout.max_blocks for name, layout in self._layouts.items()
        )

    def load(self, batch: ForwardBatch, rows: int) -> ForwardBatch:
        """Copy `batch` into the buffers and fill up to `rows` with padding; the result has the lists of all rows."""
        n = batch.num_requests
        padding = rows - n
        self._token_ids[:n].copy_(batch.token_ids)
        self._positions[:n].copy_(batch.positions)
        self._token_ids[n:].zero_()
        self._positions[n:].zero_()
        groups = {}
        for name, layout in self._layouts.items():
            group = group_of(batch, name)
            self._tables[name][:n, : group.block_table.shape[1]].copy_(group.block_table)
            self._slots[name][:n].copy_(group.slot_mapping)
            self._pad(name, n)
            groups[name] = GroupBatch(
                self._tables[name][:rows],
                [*group.first_block, *[0] * padding],
                [*group.key_floor, *[0] * padding],
                self._slots[name][:rows],
                layout.layers,
            )
        return self._batch(
            rows,
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            seq_lens=[*batch.seq_lens, *[1] * padding],
            groups=groups,
        )

    def _pad(self, name: GroupName, start: int) -> None:
        """Rows from `start` on: position 0 in the scratch block."""
        block = self._layouts[name].scratch_block
        self._tables[name][start:, 0] = block
        self._slots[name][start:] = block * self._block_size

    def _batch(
        self,
        rows: int,
        *,
        token_ids: Tensor,
        positions: Tensor,
        seq_lens: list[int],
        groups: Mapping[GroupName, GroupBatch],
    ) -> ForwardBatch:
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start=list(range(rows + 1)),
            seq_lens=seq_lens,
            block_size=self._block_size,
            full=groups["full"],
            swa=groups.get("swa"),
        )


def group_of(batch: ForwardBatch, name: GroupName) -> GroupBatch:
    """The batch's part of a group that it must have."""
    group = batch.full if name == "full" else batch.swa
    if group is None:
        raise ValueError(f"the batch has no {name} group")
    return group


@dataclass(frozen=True)
class _Captured:
    graph: Graph
    plans: Plans
    hidden: Tensor


class DecodeGraphs:
    """Called with a batch in place of the model: replays a graph where one fits, else runs the model.

    The result of a graphed step is valid until the next step. Invariant: nothing but a call changes the static inputs.
    """

    def __init__(
        self,
        model: HybridModel,
        backend: GraphAttentionBackend,
        device: GraphDevice,
        buckets: Buckets,
        *,
        block_size: int,
        groups: Mapping[GroupName, GroupLayout],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Captures all buckets, largest first; `progress` is told how many of them are done."""
        self._model = model
        self._backend = backend
        self._buckets = buckets
        self._inputs = StaticInputs(buckets.largest, block_size, groups, model.device)
        self._captured: dict[int, _Captured] = {}
        for done, size in enumerate(buckets.capture_order()):
            progress(done, len(buckets.sizes))
            self._captured[size] = self._capture(device, size)
        progress(len(buckets.sizes), len(buckets.sizes))

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [rows, hidden_size], as the model returns them."""
        bucket = self._buckets.bucket_for(batch.num_requests)
        if bucket is None or not self._inputs.fits(batch):
            return self._model(batch)
        captured = self._captured[bucket]
        padded = self._inputs.load(batch, bucket)
        for name, (_, plan) in captured.plans.items():
            self._backend.refill(plan, padded, group_of(padded, name))
        if batch.gate is not None:
            batch.gate.wait_all()
        captured.graph.replay()
        return captured.hidden[: batch.num_requests] if batch.wanted is None else captured.hidden[batch.wanted.rows]

    @torch.inference_mode()
    def _capture(self, device: GraphDevice, size: int) -> _Captured:
        static = self._inputs.view(size)
        plans: dict[GroupName, tuple[GroupBatch, object]] = {}
        names: tuple[GroupName, ...] = ("full", "swa")
        for name in names:
            spec = next(self._model.description.group_layers(name), None)
            if spec is not None:
                group = group_of(static, name)
                plans[name] = (group, self._backend.static_plan(spec, static, group))
        graph, hidden = device.capture(lambda: self._model(static, plans))
        return _Captured(graph, plans, hidden)
