"""What an attention backend is, and the table of those that registered themselves."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cygnet.base.registry import Registry
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.description import AttentionSpec
from cygnet.model.kernels import triton_available

AttentionPlan = Any
"""What a backend derives from a step's batch once per group, for all of the group's layers. Opaque to the model."""


class AttentionBackend(Protocol):
    """Causal attention over paged KV.

    The query at position p of request r sees keys at positions

        full layer   key_floor[r] .. p        (key_floor is 0 there)
        SWA layer    max(key_floor[r], p - window) .. p

    and no other slot, whatever it holds (freed slots may hold NaN), can change a result.
    """

    def plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> AttentionPlan:
        """Prepare a step for the layers of `group`, which agree with `spec` in KV shape and window.

        There may be more slots than queries (`ForwardBatch.queries_wanted`).
        """

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
        """Write the step's KV, then attend.

        Shapes: `query` [num_queries, num_heads, key_dim], `key` [num_slots, num_kv_heads, key_dim], `value` with
        value_dim, `sinks` [num_heads] or None; the result [num_queries, num_heads, value_dim] in query's dtype.
        A token whose slot is -1 does not write, and the KV cached at its position is read in place of its own.
        """


@runtime_checkable
class GraphAttentionBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in a CUDA graph: it plans in tensors that keep their addresses."""

    def static_plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> AttentionPlan:
        """A plan for steps of as many requests as `batch`, one token each, up to the block table's width.

        It refers to the memory of `group`'s block table and slot mapping, which the caller keeps current.
        """

    def refill(self, plan: AttentionPlan, batch: ForwardBatch, group: GroupBatch) -> None:
        """Adapt a static plan to a step of the same shape; only the lists of `batch` and `group` are read."""


ATTENTION_BACKENDS: Registry[Callable[[], AttentionBackend]] = Registry("attention backend")


def select_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; `auto` takes the best one for the device.

    Raises `ConfigError` if it is unknown or can't run here.
    """
    if name == "auto":
        from cygnet.model.cpu.kernels import numba_works

        if device.type == "cuda":
            name = "triton" if triton_available() else "torch"
        else:
            name = "numba" if device.type == "cpu" and numba_works() else "torch"
    return ATTENTION_BACKENDS.get(name)()
