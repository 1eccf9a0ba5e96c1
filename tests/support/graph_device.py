"""A graph device on the CPU, and an attention backend that can be captured, both by the contracts of the real ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cygnet.model.attention.backend import AttentionPlan
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV, write_kv
from cygnet.model.description import AttentionSpec


class FakeGraph:
    """Replays by running the step's code again, into the captured result."""

    def __init__(self, step: Callable[[], Tensor], result: Tensor) -> None:
        self._step = step
        self._result = result
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._result.copy_(self._step())


class FakeGraphDevice:
    """Notes the batch sizes in the order of capture."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.graphs: list[FakeGraph] = []

    def capture(self, step: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        step()
        result = step().clone()
        self.captured.append(len(result))
        self.graphs.append(FakeGraph(step, result))
        return self.graphs[-1], result


@dataclass(frozen=True)
class StaticPlan:
    """Everything a decode step depends on, in tensors."""

    group: GroupBatch
    lengths: Tensor
    first_block: Tensor
    key_floor: Tensor


class StaticTorchBackend(TorchBackend):
    """The default backend, and for static plans a masked gather of all that the block table could hold."""

    def static_plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> StaticPlan:
        del spec
        return StaticPlan(group, *(torch.tensor(x) for x in (batch.seq_lens, group.first_block, group.key_floor)))

    def refill(self, plan: StaticPlan, batch: ForwardBatch, group: GroupBatch) -> None:
        plan.lengths.copy_(torch.tensor(batch.seq_lens))
        plan.first_block.copy_(torch.tensor(group.first_block))
        plan.key_floor.copy_(torch.tensor(group.key_floor))

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        if not isinstance(plan, StaticPlan):
            return super().attend(spec, query, key, value, sinks, plan, layer_kv)
        write_kv(layer_kv, plan.group.slot_mapping, key, value)
        block_size = layer_kv.key.shape[1]
        width = plan.group.block_table.shape[1] * block_size
        position = plan.first_block.unsqueeze(1) * block_size + torch.arange(width)
        newest = plan.lengths.unsqueeze(1) - 1
        seen = (position <= newest) & (position >= plan.key_floor.unsqueeze(1))
        if spec.window is not None:
            seen &= position >= newest - spec.window
        keys, values = (
            cache[plan.group.block_table].flatten(1, 2).repeat_interleave(spec.group_size, 2)
            for cache in (layer_kv.key, layer_kv.value)
        )
        keys, values = (x.masked_fill(~seen[:, :, None, None], 0.0) for x in (keys, values))
        scores = torch.einsum("rhd,rkhd->rhk", query, keys) * spec.scale
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(len(query), -1).unsqueeze(-1)), -1)
        return torch.einsum("rhk,rkhd->rhd", scores.softmax(-1)[..., :width], values)
