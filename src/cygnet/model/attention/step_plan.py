"""Which slots each request of a step reads, worked out once for all layers of a group."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.description import AttentionSpec

DECODE_ELEMENTS = 4 << 20
"""Most K and V elements gathered for decodes at once."""
MAX_PADDING = 1.25
"""Decodes share a batch while padding keeps the keys read below this multiple of the keys needed."""


@dataclass(frozen=True)
class ChunkPlan:
    """Several tokens of one request.

    keys    0 ... num_cached - 1 | num_cached ... num_keys - 1
            visible earlier keys | the chunk's own, one per query
    """

    start_row: int
    end_row: int
    num_cached: int
    index: Tensor
    """[num_kv_heads, num_keys]: rows of the cache seen as [slots * num_kv_heads, dim], oldest key first."""

    @property
    def num_queries(self) -> int:
        return self.end_row - self.start_row

    @property
    def num_keys(self) -> int:
        return self.num_cached + self.num_queries


@dataclass(frozen=True)
class DecodePlan:
    """One token each of several requests."""

    rows: Tensor
    """[requests]: rows of the step."""
    index: Tensor
    """[requests, num_kv_heads, num_keys], as in `ChunkPlan`; a shorter request repeats its newest slot at the end."""
    mask: Tensor | None
    """[requests, 1, num_keys]: -inf at repeated slots, else 0; `None` if there are none."""

    @property
    def num_keys(self) -> int:
        return self.index.shape[-1]


@dataclass(frozen=True)
class StepPlan:
    """Everything a step does in each layer of one group."""

    slot_mapping: Tensor
    chunks: list[ChunkPlan]
    decodes: list[DecodePlan]


@dataclass(frozen=True)
class _Decode:
    request: int
    first_key: int
    num_keys: int


def plan_step(
    spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, requests: Iterable[int] | None = None
) -> StepPlan:
    """Sort `requests` (by default all of the step) into chunks and batches of decodes. Cost: O(keys read)."""
    chunks: list[ChunkPlan] = []
    decodes: list[_Decode] = []
    limit = max(1, DECODE_ELEMENTS // (spec.num_kv_heads * (spec.key_dim + spec.value_dim)))
    for request in range(batch.num_requests) if requests is None else requests:
        seq_len = batch.seq_lens[request]
        start_row, end_row = batch.query_start[request], batch.query_start[request + 1]
        if end_row == start_row:
            continue
        first_query = seq_len - (end_row - start_row)
        first_key = group.key_floor[request]
        if spec.window is not None:
            first_key = max(first_key, first_query - spec.window)
        # A decode too long to be gathered at once takes the chunks' way, which tiles its keys.
        if end_row - start_row == 1 and (spec.window is not None or seq_len - first_key <= limit):
            decodes.append(_Decode(request, first_key, seq_len - first_key))
            continue
        positions = torch.arange(first_key, seq_len, device=group.block_table.device).unsqueeze(0)
        slots = _slots(group, [request], positions, batch.block_size)
        index = _head_rows(slots, spec.num_kv_heads)[0]
        chunks.append(ChunkPlan(start_row, end_row, first_query - first_key, index))
    batches = [_plan_decodes(spec, batch, group, members) for members in _batches(decodes, limit)]
    return StepPlan(group.slot_mapping, chunks, batches)


def _batches(decodes: list[_Decode], limit: int) -> list[list[_Decode]]:
    """Requests of similar length together; each batch reads at most `limit` keys if it has more than one request."""
    batches: list[list[_Decode]] = []
    needed = 0
    for decode in sorted(decodes, key=lambda d: -d.num_keys):
        if batches:
            # The longest comes first, so its length is the padded length of the batch.
            padded = batches[-1][0].num_keys * (len(batches[-1]) + 1)
            if padded <= limit and padded <= MAX_PADDING * (needed + decode.num_keys):
                batches[-1].append(decode)
                needed += decode.num_keys
                continue
        batches.append([decode])
        needed = decode.num_keys
    return batches


def _plan_decodes(spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, decodes: list[_Decode]) -> DecodePlan:
    device = group.block_table.device
    first = torch.tensor([d.first_key for d in decodes], device=device).unsqueeze(1)
    lengths = torch.tensor([d.num_keys for d in decodes], device=device).unsqueeze(1)
    offsets = torch.arange(decodes[0].num_keys, device=device).unsqueeze(0)
    positions = first + torch.minimum(offsets, lengths - 1)
    requests = [d.request for d in decodes]
    mask = None
    if decodes[-1].num_keys < decodes[0].num_keys:
        dtype = group.layers[0].key.dtype
        mask = torch.zeros(positions.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(offsets >= lengths, float("-inf")).unsqueeze(1)
    return DecodePlan(
        rows=torch.tensor([batch.query_start[r] for r in requests], device=device),
        index=_head_rows(_slots(group, requests, positions, batch.block_size), spec.num_kv_heads),
        mask=mask,
    )


def _slots(group: GroupBatch, requests: list[int], positions: Tensor, block_size: int) -> Tensor:
    """Flat slots of `positions` [requests, n]."""
    first_block = torch.tensor([group.first_block[r] for r in requests], device=positions.device).unsqueeze(1)
    blocks = group.block_table[requests].gather(1, positions // block_size - first_block)
    return blocks * block_size + positions % block_size


def _head_rows(slots: Tensor, num_kv_heads: int) -> Tensor:
    """Slots [requests, n] as rows of single heads, [requests, num_kv_heads, n]."""
    heads = torch.arange(num_kv_heads, device=slots.device).view(1, -1, 1)
    return slots.unsqueeze(1) * num_kv_heads + heads
