"""Which tokens of a rebuild each layer computes.

A rebuild replays tokens before the end of the cached full KV to get the lost SWA window back. What is missing at its
start reaches one window further per SWA layer, so what a layer computes is of use only from some position on, and that
position is one window later for each SWA layer passed:

    exact_from - lead of layer 0                              exact_from              end of the replay
    ├── first SWA layer ───────────────────────────────────────────────────────────────────────────────
                       ├── second ─────────────────────────────────────────────────────────────────────
                                          ...                 ├── last ────────────────────────────────

So each layer runs on fewer tokens than the one before: after its attention, which has left the KV, it goes on with
those that the next layer needs. That more than halves the work of a replay. Full-attention layers compute what the next
SWA layer needs; behind the last of these nothing of the replay is needed. SWA KV before a layer's first position is
neither written nor read: the key floor is raised to it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.description import ModelDescription, RopeSpec


def replay_leads(description: ModelDescription) -> list[int]:
    """Per layer, and for the end: how many tokens before `ForwardBatch.exact_from` the hidden states that go in must be
    right. The last SWA layer's KV must be right from `exact_from` on; what comes out of it is so a window later."""
    windows = [layer.attention.window for layer in description.layers]
    lead = -next((window for window in reversed(windows) if window is not None), 0)
    leads = [lead]
    for window in reversed(windows):
        lead += window or 0
        leads.append(lead)
    return leads[::-1]


class ReplayRows:
    """The rows of one step that are left, layer after layer.

    `batch` is the step as the next layer sees it: requests of which nothing is left are not in it.
    """

    def __init__(self, batch: ForwardBatch, leads: list[int]) -> None:
        """`batch` has `exact_from`. `leads` are `replay_leads` of the model."""
        assert batch.exact_from is not None
        assert batch.swa is not None
        self.batch = batch
        self._exact_from = batch.exact_from
        self._leads = leads
        self._lead: int | None = None
        self._kept: Tensor | None = None
        """Rows of the whole step that are left; `None`: all."""

    def advance(self, layer: int) -> tuple[bool, Tensor | None]:
        """Go on to `layer`, in order, or to the end: whether `batch` is another now, and which rows it has of the one
        before (`None`: all)."""
        if self._leads[layer] == self._lead:
            return False, None
        self._lead = self._leads[layer]
        batch, floors = self.batch, [position - self._lead for position in self._exact_from]
        assert batch.swa is not None
        counts = np.diff(batch.query_start)
        dropped = np.clip(np.array(floors) - (np.array(batch.seq_lens) - counts), 0, counts)
        raised = [max(pair) for pair in zip(batch.swa.key_floor, floors, strict=True)]
        if not dropped.any():
            self.batch = replace(batch, swa=replace(batch.swa, key_floor=raised))
            return raised != batch.swa.key_floor, None
        spans = zip(batch.query_start[:-1], batch.query_start[1:], dropped.tolist(), strict=True)
        index = torch.tensor([row for first, end, less in spans for row in range(first + less, end)], dtype=torch.int64)
        index = index.to(batch.token_ids.device)
        left = np.flatnonzero(dropped < counts).tolist()
        self._exact_from = [self._exact_from[request] for request in left]
        self._kept = index if self._kept is None else self._kept[index]
        self.batch = ForwardBatch(
            token_ids=batch.token_ids[index],
            positions=batch.positions[index],
            query_start=[0, *np.cumsum((counts - dropped)[left]).tolist()],
            seq_lens=[batch.seq_lens[request] for request in left],
            block_size=batch.block_size,
            full=_part(batch.full, left, index, batch.full.key_floor),
            swa=_part(batch.swa, left, index, raised),
            gate=batch.gate,
            exact_from=self._exact_from,
        )
        return True, index

    def whole(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """`hidden` of the rows that are left, as rows of the whole step of `num_tokens`; zeros for the others."""
        if self._kept is None:
            return hidden
        return hidden.new_zeros(num_tokens, hidden.shape[1]).index_copy_(0, self._kept, hidden)


def rope_rows(ropes: Mapping[RopeSpec, tuple[Tensor, Tensor]], index: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
    """Cosines and sines of the rows `index`."""
    return {spec: (cos[index], sin[index]) for spec, (cos, sin) in ropes.items()}


def _part(group: GroupBatch, requests: list[int], index: Tensor, key_floor: list[int]) -> GroupBatch:
    return GroupBatch(
        block_table=group.block_table[requests],
        first_block=[group.first_block[request] for request in requests],
        key_floor=[key_floor[request] for request in requests],
        slot_mapping=group.slot_mapping[index],
        layers=group.layers,
    )
