"""Attention spelled out query by query: slow, obvious, and what every other backend is checked against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cygnet.model.attention.backend import ATTENTION_BACKENDS
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV, write_kv
from cygnet.model.description import AttentionSpec


@dataclass(frozen=True)
class ReferencePlan:
    """The batch itself: nothing is prepared."""

    batch: ForwardBatch
    group: GroupBatch


@ATTENTION_BACKENDS.register("reference")
class ReferenceBackend:
    """Softmax in fp64, one query and one head at a time."""

    def plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> ReferencePlan:
        return ReferencePlan(batch, group)

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: ReferencePlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        batch, group = plan.batch, plan.group
        write_kv(layer_kv, group.slot_mapping, key, value)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        for request in range(batch.num_requests):
            end_row = batch.query_start[request + 1]
            for row in range(batch.query_start[request], end_row):
                position = batch.seq_lens[request] - (end_row - row)
                start = group.key_floor[request]
                if spec.window is not None:
                    start = max(start, position - spec.window)
                keys, values = _read(layer_kv, batch, group, request, range(start, position + 1))
                for head in range(spec.num_heads):
                    kv_head = head // spec.group_size
                    sink = None if sinks is None else sinks[head]
                    out[row, head] = _attend_one(
                        query[row, head], keys[:, kv_head], values[:, kv_head], sink, spec.scale
                    )
        return out


def _read(
    layer_kv: LayerKV, batch: ForwardBatch, group: GroupBatch, request: int, positions: range
) -> tuple[Tensor, Tensor]:
    """K and V of the request's positions, fp64, one slot after the other."""
    keys, values = [], []
    for position in positions:
        column = position // batch.block_size - group.first_block[request]
        block, offset = int(group.block_table[request, column]), position % batch.block_size
        keys.append(layer_kv.key[block, offset].double())
        values.append(layer_kv.value[block, offset].double())
    return torch.stack(keys), torch.stack(values)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, sink: Tensor | None, scale: float) -> Tensor:
    """Result [value_dim] of one query [key_dim] over keys [n, key_dim] and values [n, value_dim]."""
    scores = keys @ query.double() * scale
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1)])
    probabilities = scores.softmax(0)[: len(keys)]
    return (probabilities @ values).to(query.dtype)
