"""What a model's forward pass is told about the requests in a step. Built by the engine's model runner."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from cygnet.model.description import GroupName

NO_REPLAY = -(1 << 40)
"""Before every position, however many windows are added."""


@dataclass(frozen=True)
class LayerKV:
    """KV storage of one layer: `key` [num_blocks, block_size, num_kv_heads, key_dim]; `value` with value_dim."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class GroupBatch:
    """Where one group (full or swa) keeps the KV of the step's requests.

    Request `r` at position `p` lives in block `block_table[r, p // block_size - first_block[r]]`, at offset
    `p % block_size`. Columns beyond a request's blocks hold ids of any blocks and are never read.

        positions   0 ......... key_floor ......... query 0 ... query n-1 = seq_len - 1
                    not readable | readable, cached  | this step's tokens
    """

    block_table: Tensor
    """[num_requests, max_blocks] int64, on the CPU for CPU models."""
    first_block: list[int]
    """Block index (position // block_size) of column 0, per request; all 0 in the full group."""
    key_floor: list[int]
    """First position whose KV may be read, per request. Above 0 in the swa group only: where the live window starts, or
    where the replay of a window rebuild started."""
    slot_mapping: Tensor
    """[num_tokens] int64: flat slot (block * block_size + offset) to write a token's KV to; -1 means don't write, since
    the cache already holds the authoritative KV of that position (window rebuild)."""
    layers: list[LayerKV]
    """KV storage by the layer's index within its group."""


class LayerGate(Protocol):
    """KV that is still being copied into the batch's blocks while the step runs. Both raise what a copy failed with."""

    def wait(self, group: GroupName, index: int) -> None:
        """Until what the step reads of the group's layer `index` is there, for all work that is asked for from now
        on."""

    def wait_all(self) -> None:
        """The same for all layers."""


@dataclass(frozen=True)
class Wanted:
    """The rows whose hidden states are asked for: the last one of each of these requests."""

    requests: list[int]
    """In rising order; may be none."""
    rows: Tensor
    """[requests] int64: their rows, on the model's device."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step: `num_tokens` tokens of `num_requests` requests, request after request.

    Request `r` owns rows `query_start[r]:query_start[r + 1]`; its last row is at position `seq_lens[r] - 1`.
    """

    token_ids: Tensor
    """[num_tokens] int64"""
    positions: Tensor
    """[num_tokens] int64"""
    query_start: list[int]
    """[num_requests + 1]"""
    seq_lens: list[int]
    """[num_requests]: tokens whose KV exists after this step, i.e. computed before + scheduled now."""
    block_size: int
    full: GroupBatch
    swa: GroupBatch | None
    """None for a model without SWA layers."""
    gate: LayerGate | None = None
    """To be waited at before each layer reads or writes KV. None when all KV is there."""
    wanted: Wanted | None = None
    """None: all rows."""
    exact_from: list[int] | None = None
    """First position, per request, whose SWA KV must be right in all layers; `NO_REPLAY` for those that replay nothing.
    Where it lies behind the request's first tokens, later layers may leave out some of them (`model/replay.py`): their
    SWA KV is not written, and their hidden states are of no use. None when no request replays a window."""

    def queries_wanted(self) -> "ForwardBatch":
        """For the last layer, whose KV is written for all tokens: only the wanted rows are queries, numbered anew.

        `token_ids`, `positions` and the slots stay those of all tokens.
        """
        assert self.wanted is not None
        counts = [0] * self.num_requests
        for request in self.wanted.requests:
            counts[request] = 1
        return replace(self, query_start=[0, *accumulate(counts)], wanted=None)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def write_kv(layer: LayerKV, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """Store `key` [T, num_kv_heads, key_dim] and `value` [T, num_kv_heads, value_dim] in the slots; -1 is skipped."""
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        slot_mapping, key, value = slot_mapping[keep], key[keep], value[keep]
    layer.key.view(-1, *layer.key.shape[2:]).index_copy_(0, slot_mapping, key.to(layer.key.dtype))
    layer.value.view(-1, *layer.value.shape[2:]).index_copy_(0, slot_mapping, value.to(layer.value.dtype))
