"""Carries out step plans: block tables, forward pass, sampling."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cygnet.base.ids import RequestId
from cygnet.engine.plan import NewRequest, SampledToken, ScheduledRequest, StepPlan, StepResult
from cygnet.engine.request import Request
from cygnet.engine.runtime.sampler import SamplingState, all_plain_greedy, sample
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.decoder import HybridModel

Ints = NDArray[np.int64]


class Row:
    """What the runner keeps of a running request: tokens and both block tables, grown in place."""

    def __init__(self, new: NewRequest, stop_ids: tuple[int, ...]) -> None:
        self.tokens = np.array(new.token_ids, dtype=np.int64)
        self.num_tokens = len(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.write_full_from = new.write_full_from
        self.key_floor = new.key_floor
        self.full = np.zeros(64, dtype=np.int64)
        self.swa = np.zeros(64, dtype=np.int64)
        self.sampling = SamplingState(new.sampling, stop_ids, new.num_prompt_tokens)
        self.sampling.start(new.token_ids)

    def append(self, token_id: int) -> None:
        self.tokens = _put(self.tokens, self.num_tokens, (token_id,))
        self.num_tokens += 1
        self.sampling.append(token_id)

    def take_blocks(self, scheduled: ScheduledRequest) -> None:
        self.full = _put(self.full, scheduled.full_offset, scheduled.new_full_blocks)
        self.swa = _put(self.swa, scheduled.swa_offset, scheduled.new_swa_blocks)

    def audit(self, request: Request, block_size: int) -> list[str]:
        """What differs from the core's idea of the request."""
        kv = request.kv
        full, live = len(kv.full_blocks), slice(kv.live_from, len(kv.swa_blocks))
        checks = (
            ("tokens", self.tokens[: self.num_tokens].tolist() == request.token_ids),
            ("prompt length", self.num_prompt_tokens == request.num_prompt_tokens),
            ("cached prefix", self.write_full_from == kv.num_hit_blocks * block_size),
            ("key floor", self.key_floor == kv.key_floor),
            ("full block table", self.full[:full].tolist() == kv.full_blocks),
            ("SWA block table", self.swa[live].tolist() == kv.swa_blocks[live]),
            ("output counts", self.sampling.counts_agree(request.token_ids)),
        )
        return [f"the runner's row of {request.request_id} has another {what}" for what, good in checks if not good]


def _put(array: Ints, offset: int, values: Sequence[int]) -> Ints:
    """`array` with `values` at `offset`; grown by doubling when they don't fit."""
    end = offset + len(values)
    if end > len(array):
        array = np.concatenate((array, np.zeros(max(end, 2 * len(array)) - len(array), dtype=np.int64)))
    array[offset:end] = values
    return array


class ModelRunner:
    """Runs one model on one device.

    Invariants (`audit`, between steps): it has a row for exactly the core's running requests and those that the next
    plan declares gone; a row's tokens and block tables are the request's.
    """

    def __init__(self, model: HybridModel, pool: DevicePool, *, window: int, eos_token_ids: Sequence[int]) -> None:
        self._model = model
        self._pool = pool
        self._window = window
        # A tokenizer may know tokens that the model has no logits for.
        self._eos = tuple(token for token in eos_token_ids if token < model.description.vocab_size)
        self._rows: dict[RequestId, Row] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass; a sampled token for every request that reached its last token."""
        self._pool.poison_blocks(plan.freed_full, plan.freed_swa)
        for request_id in plan.gone:
            self._rows.pop(request_id, None)
        for new in plan.new:
            eos = () if new.sampling.ignore_eos else self._eos
            self._rows[new.request_id] = Row(new, (*new.sampling.stop_token_ids, *eos))
        for scheduled in plan.requests:
            self._rows[scheduled.request_id].take_blocks(scheduled)
        hidden = self._model(self._batch(plan.requests))
        return StepResult(plan.step, self._sample(plan.requests, hidden))

    def _sample(self, requests: Sequence[ScheduledRequest], hidden: torch.Tensor) -> dict[RequestId, SampledToken]:
        ends = np.cumsum([r.num_tokens for r in requests]) - 1
        wanted = [(r.request_id, end) for r, end in zip(requests, ends.tolist(), strict=True) if r.sample]
        if not wanted:
            return {}
        rows = [self._rows[request_id] for request_id, _ in wanted]
        last = hidden[torch.tensor([end for _, end in wanted], device=hidden.device)]
        counts = [row.num_tokens - row.num_prompt_tokens for row in rows]
        states = [row.sampling for row in rows]
        if all_plain_greedy(states, counts):  # without a copy of all logits in fp32
            tokens = [SampledToken(token) for token in self._model.greedy(last).tolist()]
        else:
            tokens = sample(self._model.logits(last), states, counts)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token.token_id)
        return {request_id: token for (request_id, _), token in zip(wanted, tokens, strict=True)}

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        """All discrepancies between the rows and the core's running requests."""
        expected = running.keys() | set(gone)
        faults = [f"the runner has a row of {rid}, which does not run" for rid in self._rows.keys() - expected]
        faults += [f"the runner has no row of {rid}" for rid in expected - self._rows.keys()]
        for request_id in running.keys() & self._rows.keys():
            faults += self._rows[request_id].audit(running[request_id], self._pool.block_size)
        return faults

    # ------------------------------------------------------------------- batch

    def _batch(self, requests: Sequence[ScheduledRequest]) -> ForwardBatch:
        rows = [self._rows[r.request_id] for r in requests]
        pairs = list(zip(requests, rows, strict=True))
        size = self._pool.block_size
        full = self._group(
            [_Table(row.full, 0, 0, write_from=row.write_full_from) for row in rows], requests, self._pool.full
        )
        swa = None
        if self._pool.swa:
            # Tables begin with the first block that the request's first query may read.
            firsts = [max(row.key_floor, r.start - self._window) // size for r, row in pairs]
            tables = [_Table(row.swa, first, row.key_floor) for row, first in zip(rows, firsts, strict=True)]
            swa = self._group(tables, requests, self._pool.swa)
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate([row.tokens[r.start : r.start + r.num_tokens] for r, row in pairs])),
            positions=self._tensor(np.concatenate([_positions(r) for r in requests])),
            query_start=[0, *np.cumsum([r.num_tokens for r in requests]).tolist()],
            seq_lens=[r.start + r.num_tokens for r in requests],
            block_size=size,
            full=full,
            swa=swa,
        )

    def _group(
        self, tables: Sequence["_Table"], requests: Sequence[ScheduledRequest], layers: list[LayerKV]
    ) -> GroupBatch:
        size = self._pool.block_size
        lasts = [-(-(r.start + r.num_tokens) // size) for r in requests]
        width = max(last - table.first_block for table, last in zip(tables, lasts, strict=True))
        padded = np.zeros((len(tables), width), dtype=np.int64)
        slots = []
        for index, (table, request, last) in enumerate(zip(tables, requests, lasts, strict=True)):
            padded[index, : last - table.first_block] = table.blocks[table.first_block : last]
            positions = _positions(request)
            mapping = table.blocks[positions // size] * size + positions % size
            slots.append(np.where(positions < table.write_from, -1, mapping))
        return GroupBatch(
            block_table=self._tensor(padded),
            first_block=[table.first_block for table in tables],
            key_floor=[table.key_floor for table in tables],
            slot_mapping=self._tensor(np.concatenate(slots)),
            layers=layers,
        )

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._model.device)


@dataclass(frozen=True, slots=True)
class _Table:
    """One request's block table in one group, and what of it a step may read and write."""

    blocks: Ints
    first_block: int
    key_floor: int
    write_from: int = 0


def _positions(request: ScheduledRequest) -> Ints:
    return np.arange(request.start, request.start + request.num_tokens)
