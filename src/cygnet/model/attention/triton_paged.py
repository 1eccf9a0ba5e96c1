"""Paged attention in Triton kernels, for GPUs: KV write, prefill with prefix, split-KV decode.

    chunks     one program per tile of queries and KV head. Full layers read all earlier keys; SWA layers begin one
               window before the tile, so their cost does not depend on the length of the prefix
    decodes    one program per request, KV head and part of the keys; a second kernel joins the parts

Keys and values are read where they lie, through the block table; nothing is gathered into other memory.

**Not run on a GPU.** Checked against the reference in Triton's interpreter on the CPU (`TRITON_INTERPRET=1`), and
compiled for several architectures; tile sizes and the number of splits are guesses (docs/gpu.md).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cygnet.base.errors import ConfigError
from cygnet.model.attention.backend import ATTENTION_BACKENDS
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.description import AttentionSpec
from cygnet.model.kernels import FLOAT_DTYPES, interpreted, require_triton, tiles

LOG2_E = math.log2(math.e)
PROCESSORS_INTERPRETED = 8
"""Multiprocessors that the interpreter is planned for."""


@dataclass(frozen=True)
class TritonPlan:
    """A step in one group, in device tensors. Integers are int32 but for the table and the slots (int64)."""

    table: Tensor
    """[R, blocks]: the group's block table."""
    slots: Tensor
    """[num_tokens]"""
    packed: Tensor
    """Memory of the three tensors below, copied to the device at once."""
    requests: Tensor
    """[R + 1, 4]: first row, sequence length, block index of column 0, first readable position; then num_tokens."""
    decodes: Tensor
    """[decodes]: requests with one token."""
    query_tiles: Tensor
    """[tiles, 2]: request and first query (counted within its chunk) of every tile of `queries` queries."""
    queries: int
    num_splits: int
    """Parts that each decode's keys are cut into."""


@ATTENTION_BACKENDS.register("triton")
class TritonBackend:
    """Scores and sums in fp32; inputs and cache in bf16, fp16 or fp32.

    Decode steps can be captured in CUDA graphs: see `static_plan`.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` without Triton, or without a GPU to run on."""
        require_triton()
        from cygnet.model.kernels import paged_attention

        self._kernels = paged_attention

    def plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> TritonPlan:
        """Cost on the CPU: O(requests + tiles), and one copy to the device."""
        max_keys = max((n - f for n, f in zip(batch.seq_lens, group.key_floor, strict=True)), default=0)
        return self._plan(spec, batch, group, max_keys)

    def static_plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> TritonPlan:
        """A plan for steps of one token per request whose tensors keep their addresses, for capture in a CUDA graph.

        It refers to the memory of `group`'s block table and slots, which the caller keeps current. The grid is chosen
        for the longest sequences that the block table's width allows. `refill` adapts it to a step.
        """
        return self._plan(spec, batch, group, group.block_table.shape[1] * batch.block_size)

    def refill(self, plan: TritonPlan, batch: ForwardBatch, group: GroupBatch) -> None:
        """Make a static plan fit another batch of as many requests, one token each."""
        packed = _pack(batch, group, plan.queries)[0]
        if packed.size != plan.packed.numel():
            raise ValueError("a static plan serves batches of the shape it was made for")
        plan.packed.copy_(_source(packed, plan.packed.device), non_blocking=True)

    def _plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, max_keys: int) -> TritonPlan:
        cache = group.layers[0].key
        _check(cache)
        rows = tiles.prefill_tiles(spec.key_dim, spec.value_dim, spec.group_size, cache.itemsize).rows
        queries = max(1, rows // spec.group_size)
        host, num_decodes = _pack(batch, group, queries)
        packed = _source(host, cache.device).to(cache.device, non_blocking=True)
        end_requests = 4 * (batch.num_requests + 1)
        end_decodes = end_requests + num_decodes
        if spec.window is not None:
            max_keys = min(max_keys, spec.window + 1)
        return TritonPlan(
            table=group.block_table,
            slots=group.slot_mapping,
            packed=packed,
            requests=packed[:end_requests].view(-1, 4),
            decodes=packed[end_requests:end_decodes],
            query_tiles=packed[end_decodes:].view(-1, 2),
            queries=queries,
            num_splits=tiles.num_splits(num_decodes, spec.num_kv_heads, max_keys, _num_processors(cache.device)),
        )

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: TritonPlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        self._write_kv(spec, _rows(key), _rows(value), plan.slots, layer_kv)
        query = _rows(query.to(layer_kv.key.dtype))
        if len(plan.query_tiles):
            self._prefill(spec, query, sinks, plan, layer_kv, out)
        if len(plan.decodes):
            self._decode(spec, query, sinks, plan, layer_kv, out)
        return out

    def _write_kv(self, spec: AttentionSpec, key: Tensor, value: Tensor, slots: Tensor, layer_kv: LayerKV) -> None:
        self._kernels.write_kv_kernel[(key.shape[0],)](
            layer_kv.key,
            layer_kv.value,
            key,
            value,
            slots,
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_HEADS=spec.num_kv_heads,
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            HEADS_PAD=tiles.power_of_two(spec.num_kv_heads),
            KEY_PAD=tiles.power_of_two(spec.key_dim),
            VALUE_PAD=tiles.power_of_two(spec.value_dim),
        )

    def _prefill(
        self, spec: AttentionSpec, query: Tensor, sinks: Tensor | None, plan: TritonPlan, layer_kv: LayerKV, out: Tensor
    ) -> None:
        tile = tiles.prefill_tiles(spec.key_dim, spec.value_dim, spec.group_size, query.itemsize)
        self._kernels.prefill_kernel[(len(plan.query_tiles), spec.num_kv_heads)](
            out,
            query,
            layer_kv.key,
            layer_kv.value,
            sinks,
            plan.table,
            plan.requests,
            plan.query_tiles,
            spec.scale * LOG2_E,
            plan.table.stride(0),
            *query.stride()[:2],
            out.stride(0),
            **_shape(spec, layer_kv, sinks),
            WINDOW=-1 if spec.window is None else spec.window,
            # Layers of a group may differ in query heads: the plan fixes a tile's queries, a layer its rows.
            ROWS=max(tiles.MIN_DOT, tiles.power_of_two(plan.queries * spec.group_size)),
            QUERIES=plan.queries,
            TILE_KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _decode(
        self, spec: AttentionSpec, query: Tensor, sinks: Tensor | None, plan: TritonPlan, layer_kv: LayerKV, out: Tensor
    ) -> None:
        tile = tiles.decode_tiles(spec.key_dim, spec.value_dim, spec.group_size, query.itemsize)
        num_decodes, splits = len(plan.decodes), plan.num_splits
        parts, lse = out, out
        if splits > 1:
            shape = (num_decodes, spec.num_heads, splits)
            lse = torch.empty(shape, dtype=torch.float32, device=out.device)
            parts = torch.empty(*shape, spec.value_dim, dtype=torch.float32, device=out.device)
        self._kernels.decode_kernel[(num_decodes, spec.num_kv_heads, splits)](
            out,
            parts,
            lse,
            query,
            layer_kv.key,
            layer_kv.value,
            sinks,
            plan.table,
            plan.requests,
            plan.decodes,
            spec.scale * LOG2_E,
            plan.table.stride(0),
            *query.stride()[:2],
            out.stride(0),
            **_shape(spec, layer_kv, sinks),
            WINDOW=-1 if spec.window is None else spec.window,
            ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            NUM_SPLITS=splits,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if splits > 1:
            self._kernels.reduce_kernel[(num_decodes, spec.num_heads)](
                out,
                parts,
                lse,
                sinks,
                plan.requests,
                plan.decodes,
                out.stride(0),
                NUM_HEADS=spec.num_heads,
                VALUE_DIM=spec.value_dim,
                VALUE_PAD=tiles.power_of_two(spec.value_dim),
                HAS_SINKS=sinks is not None,
                NUM_SPLITS=splits,
                SPLITS_PAD=tiles.power_of_two(splits),
            )


def _shape(spec: AttentionSpec, layer_kv: LayerKV, sinks: Tensor | None) -> dict[str, Any]:
    """Arguments that prefill and decode share."""
    return {
        "BLOCK_SIZE": layer_kv.key.shape[1],
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.group_size,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "KEY_PAD": tiles.padded_dim(spec.key_dim),
        "VALUE_PAD": tiles.padded_dim(spec.value_dim),
        "HAS_SINKS": sinks is not None,
        "WIDEN": interpreted() and layer_kv.key.dtype == torch.bfloat16,
    }


def _pack(batch: ForwardBatch, group: GroupBatch, queries: int) -> tuple[NDArray[np.int32], int]:
    """Requests, decodes and query tiles of `TritonPlan`, one behind the other; and the number of decodes."""
    starts = np.asarray(batch.query_start, dtype=np.int32)
    requests = np.zeros((len(starts), 4), dtype=np.int32)
    requests[:, 0] = starts
    requests[:-1, 1] = batch.seq_lens
    requests[:-1, 2] = group.first_block
    requests[:-1, 3] = group.key_floor
    lengths = np.diff(starts)
    decodes = np.flatnonzero(lengths == 1).astype(np.int32)
    # Long chunks first: their last tiles have the most keys, and what starts last should be short.
    chunks = np.flatnonzero(lengths > 1)
    pairs = [(r, first) for r in chunks[np.argsort(-lengths[chunks])] for first in range(0, lengths[r], queries)]
    tile_array = np.asarray(pairs, dtype=np.int32)
    return np.concatenate((requests.ravel(), decodes, tile_array.ravel())), len(decodes)


def _source(packed: NDArray[np.int32], device: torch.device) -> Tensor:
    """`packed` to be copied to `device` without waiting for it. From pageable memory a copy may wait for all that the
    device has to do. Pinned memory need not be kept: torch gives it to nobody else until the copy is done."""
    source = torch.from_numpy(packed)
    return source.pin_memory() if device.type == "cuda" else source


def _rows(heads: Tensor) -> Tensor:
    """`heads` [tokens, heads, dim] with each head's dimensions side by side."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _check(cache: Tensor) -> None:
    if cache.dtype not in FLOAT_DTYPES:
        raise ConfigError(
            f"attention backend 'triton' can't compute in {cache.dtype}; use engine.attention_backend = 'auto'"
        )
    if cache.device.type == "cpu" and not interpreted():
        raise ConfigError("attention backend 'triton' runs on GPUs, the model is on the CPU; use 'auto'")


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
