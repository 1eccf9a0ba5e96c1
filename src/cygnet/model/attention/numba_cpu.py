"""Compiled kernels that read paged KV in place, one for decodes and one for chunks of several tokens.

Registered always; made only where numba works.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cygnet.base.errors import ConfigError
from cygnet.model.attention.backend import ATTENTION_BACKENDS
from cygnet.model.attention.chunk_pieces import plan_pieces
from cygnet.model.attention.step_plan import StepPlan
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.cpu.chunk_layout import scratch_floats
from cygnet.model.cpu.kernels import SUFFIX, Kernel, kernel, numba_works
from cygnet.model.cpu.team import num_threads
from cygnet.model.description import AttentionSpec

KEYS_PER_PART = 128
"""Keys of a part of a request, at least."""
PARTS_PER_THREAD = 4
"""Parts that a step is cut into, per thread and about, so that no thread is left with much more than the others."""
ALONE = 16384
"""Keys times dimension up to which one thread is faster than waking the others."""
CHUNKS_ALONE = 1 << 18
"""Rows times keys times dimension up to which one thread does the chunks."""
ROWS_WRITTEN = 16
"""Tokens whose KV one piece of work writes."""
_TILE = 32
ALL_KEYS = 1 << 30
"""A window that hides nothing."""


@dataclass(frozen=True)
class NumbaPlan:
    """What the kernels are told of a step's chunks and decodes."""

    slot_mapping: Tensor
    write_first: bool
    """Whether the KV of all tokens is written by a kernel of its own."""
    pieces: np.ndarray
    """int64 [pieces, FIELDS]: of the chunks, as the kernel documents them."""
    chunk_threads: int
    chunk_scratch: int
    """Floats of scratch per thread."""
    table: Tensor
    """The group's block table; `decodes` holds addresses in it."""
    decodes: np.ndarray
    """int64 [requests, 6]: row, slot to write or -1, first key, end of keys, address of block ids, first block."""
    parts: int
    threads: int
    done: np.ndarray
    """int64 [requests * kv_heads], zeros: parts done, as the kernel counts them."""
    scratch: Tensor
    part_size: int

    @property
    def arguments(self) -> tuple[int, dict[int, int]] | None:
        """Of the decode kernel, for `cpu.programs`; `None` for a step with chunks."""
        if self.write_first or not len(self.decodes):
            return None
        return self.threads, {
            9: self.decodes.ctypes.data,
            10: len(self.decodes),
            11: self.parts,
            17: self.scratch.data_ptr(),
            18: self.part_size,
            19: self.done.ctypes.data,
        }


@ATTENTION_BACKENDS.register("numba")
class NumbaBackend:
    """For bf16, fp32, and fp32 with KV in bf16 on CPUs; other dtypes are left to the `torch` backend. One step at a
    time."""

    def __init__(self) -> None:
        if not numba_works():
            raise ConfigError("attention backend 'numba' needs numba: pip install 'cygnet[cpu]', or use 'torch'")
        self._torch = TorchBackend()
        self._scratch = torch.empty(0)

    def plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> NumbaPlan | StepPlan:
        dtype = group.layers[0].key.dtype
        # Keys of bf16 are read in pairs.
        if dtype not in SUFFIX or spec.key_dim * dtype.itemsize % 4:
            return self._torch.plan(spec, batch, group)
        rows = np.diff(np.array(batch.query_start))
        single, several = ([int(r) for r in np.flatnonzero(found)] for found in (rows == 1, rows > 1))
        pieces, cost = plan_pieces(spec, batch, group, several, num_threads())
        chunk_threads = 1 if cost * spec.key_dim <= CHUNKS_ALONE else min(num_threads(), len(pieces))
        chunk_scratch = scratch_floats(spec.key_dim, spec.value_dim)
        write_first = bool(several) or len(group.slot_mapping) > batch.query_start[-1]
        decodes, num_keys, longest = self._decodes(spec, batch, group, single, write=not write_first)
        threads = 1 if num_keys * spec.num_kv_heads * spec.key_dim <= ALONE else num_threads()
        wanted = -(-longest * PARTS_PER_THREAD * threads // max(1, num_keys * spec.num_kv_heads))
        parts = 1 if threads == 1 else max(1, min(wanted, longest // KEYS_PER_PART))
        pairs = len(single) * spec.num_kv_heads
        part_size = _padded(spec.group_size * (spec.value_dim + 2))
        per_thread = _padded(spec.group_size * (max(spec.key_dim, 2 * _TILE) + _TILE) + 4 * _TILE)
        decode_scratch = pairs * parts * part_size + threads * per_thread if single else 0
        return NumbaPlan(
            slot_mapping=group.slot_mapping,
            write_first=write_first,
            pieces=pieces,
            chunk_threads=chunk_threads,
            chunk_scratch=chunk_scratch,
            table=group.block_table,
            decodes=decodes,
            parts=parts,
            threads=threads,
            done=np.zeros(pairs, dtype=np.int64),
            scratch=self._room(max(decode_scratch, chunk_threads * chunk_scratch if several else 0)),
            part_size=part_size,
        )

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: NumbaPlan | StepPlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        if isinstance(plan, StepPlan):
            return self._torch.attend(spec, query, key, value, sinks, plan, layer_kv)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        query, key = query.contiguous(), key.contiguous()
        if value.stride(2) != 1 or value.stride(1) != spec.value_dim:
            value = value.contiguous()
        if plan.write_first:
            self._write(key, value, plan, layer_kv)
        if len(plan.pieces):
            self._chunks(spec, query, sinks, plan, layer_kv, out)
        if len(plan.decodes):
            self._decode(spec, query, key, value, sinks, plan, layer_kv, out)
        return out

    def _write(self, key: Tensor, value: Tensor, plan: NumbaPlan, layer_kv: LayerKV) -> None:
        """The KV of all tokens, before any thread reads it."""
        rows, key_size, value_size = key.shape[0], key[0].numel(), value[0].numel()
        _kernel("write", key, layer_kv)(
            1 if rows * (key_size + value_size) <= ALONE else num_threads(),
            key.data_ptr(),
            value.data_ptr(),
            layer_kv.key.data_ptr(),
            layer_kv.value.data_ptr(),
            plan.slot_mapping.data_ptr(),
            rows,
            ROWS_WRITTEN,
            key_size,
            value_size,
            value.stride(0),
        )

    def _chunks(
        self,
        spec: AttentionSpec,
        query: Tensor,
        sinks: Tensor | None,
        plan: NumbaPlan,
        layer_kv: LayerKV,
        out: Tensor,
    ) -> None:
        _kernel("chunks", query, layer_kv)(
            plan.chunk_threads,
            layer_kv.key.data_ptr(),
            layer_kv.value.data_ptr(),
            query.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            plan.pieces.ctypes.data,
            len(plan.pieces),
            plan.scratch.data_ptr(),
            plan.chunk_scratch,
            layer_kv.key.shape[1],
            spec.num_kv_heads,
            spec.group_size,
            spec.key_dim,
            spec.value_dim,
            ALL_KEYS if spec.window is None else spec.window,
            spec.scale,
        )

    def _decode(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: NumbaPlan,
        layer_kv: LayerKV,
        out: Tensor,
    ) -> None:
        _kernel("decode", query, layer_kv)(
            plan.threads,
            layer_kv.key.data_ptr(),
            layer_kv.value.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            plan.decodes.ctypes.data,
            len(plan.decodes),
            plan.parts,
            layer_kv.key.shape[1],
            spec.num_kv_heads,
            spec.group_size,
            spec.key_dim,
            spec.value_dim,
            plan.scratch.data_ptr(),
            plan.part_size,
            plan.done.ctypes.data,
            spec.scale,
            value.stride(0),
        )

    def _decodes(
        self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, requests: list[int], *, write: bool
    ) -> tuple[np.ndarray, int, int]:
        """Rows for the kernel, keys of all requests, keys of the longest. `write` lets the kernel write the KV."""
        table, slots = group.block_table, group.slot_mapping
        address, row_bytes = table.data_ptr(), table.stride(0) * table.itemsize
        rows, num_keys, longest = [], 0, 0
        for request in requests:
            row, seq_len = batch.query_start[request], batch.seq_lens[request]
            first = group.key_floor[request]
            if spec.window is not None:
                first = max(first, seq_len - 1 - spec.window)
            rows.append((row, -1, first, seq_len, address + request * row_bytes, group.first_block[request]))
            num_keys += seq_len - first
            longest = max(longest, seq_len - first)
        decodes = np.array(rows, dtype=np.int64).reshape(-1, 6)
        if write:
            decodes[:, 1] = slots.numpy()[decodes[:, 0]]
        return decodes, num_keys, longest

    def _room(self, size: int) -> Tensor:
        """Scratch memory, kept from step to step: both groups may share it, since one layer runs at a time."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(2 * size)
        return self._scratch


def _kernel(name: str, like: Tensor, layer_kv: LayerKV) -> Kernel:
    """The kernel for elements of `like` over such a cache."""
    return kernel(name if layer_kv.key.dtype == like.dtype else f"{name}_narrow", like.dtype)


def _padded(size: int) -> int:
    """Up to a whole number of cache lines of floats."""
    return -(-size // 16) * 16
