"""From a step's requests to the tensors that a forward pass reads."""

from collections.abc import Sequence

import numpy as np
import torch

from cygnet.base.ids import RequestId
from cygnet.engine.plan import ScheduledRequest
from cygnet.engine.runtime.rows import Row, Rows
from cygnet.engine.runtime.step_device import Ints, Staging
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.model.batch import NO_REPLAY, ForwardBatch, GroupBatch, Wanted


class StepInputs:
    """What is worked out of one step's requests, all at once for every request and token.

    request          0         1         2
    tokens       [ a b c d | e | f g h ]
    query_start    0         4   5       8
    """

    def __init__(self, requests: Sequence[ScheduledRequest], rows: Rows) -> None:
        self._requests = requests
        self._all = rows
        self._rows: list[Row] = [rows[r.request_id] for r in requests]
        self._lines = np.array([row.line for row in self._rows], dtype=np.int64)
        self._start = np.array([r.start for r in requests], dtype=np.int64)
        count = np.array([r.num_tokens for r in requests], dtype=np.int64)
        self._end = self._start + count
        self.query_start: Ints = np.concatenate(([0], np.cumsum(count)))
        self.num_tokens = int(self.query_start[-1])
        # Of every token: the request it belongs to, and where it stands.
        if self.num_tokens == len(requests):
            self._token_lines, self._positions = self._lines, self._start
        else:
            owner = np.repeat(np.arange(len(requests)), count)
            self._token_lines = self._lines[owner]
            self._positions = np.arange(self.num_tokens) + (self._start - self.query_start[:-1])[owner]
        self._sampling = [index for index, request in enumerate(requests) if request.sample]
        self.sampled: list[tuple[RequestId, Row]] = [(requests[i].request_id, self._rows[i]) for i in self._sampling]
        """Requests that get a token, in the step's order."""
        self._sampled_tokens = self.query_start[1:][self._sampling] - 1

    def num_outputs(self) -> list[int]:
        """How many output tokens each request of `sampled` has already."""
        known = self._all.num_tokens[[row.line for _, row in self.sampled]].tolist()
        return [count - row.num_prompt_tokens for count, (_, row) in zip(known, self.sampled, strict=True)]

    def batch(self, pool: DevicePool, staging: Staging, *, window: int) -> ForwardBatch:
        """The step on the device; wanted are the tokens to choose a next one after.

        It refers to memory of `staging`, which serves one step at a time.
        """
        size, n = pool.block_size, len(self._requests)
        last_block = -(-self._end // size)
        first_swa = np.maximum(self._all.key_floor[self._lines], self._start - window) // size
        full_width, swa_width = int(last_block.max()), int((last_block - first_swa).max())
        shapes = [(self.num_tokens,)] * 3 + [(n, full_width), (len(self._sampled_tokens),)]
        if pool.swa:
            shapes += [(self.num_tokens,), (n, swa_width)]
        tokens, positions, full_slots, full_table, sampled, *swa = staging.lay_out(*shapes)
        self._put_tokens(tokens)
        positions[:] = self._positions
        sampled[:] = self._sampled_tokens
        self._all.gather_full(self._lines, full_table)
        self._put_slots(full_slots, self._all.full, size)
        full_slots[self._positions < self._all.write_full_from[self._token_lines]] = -1
        if pool.swa:
            # Tables begin with the first block that the request's first query may read.
            self._all.gather_swa(self._lines, first_swa, swa[1])
            self._put_slots(swa[0], self._all.swa, size)
        on_device = staging.upload()
        return self._batch(pool, on_device, first_swa)

    def _batch(self, pool: DevicePool, tensors: Sequence[torch.Tensor], first_swa: Ints) -> ForwardBatch:
        tokens, positions, full_slots, full_table, sampled, *swa = tensors
        all_sampled = len(self._sampled_tokens) == self.num_tokens
        nothing = [0] * len(self._requests)
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            query_start=self.query_start.tolist(),
            seq_lens=self._end.tolist(),
            block_size=pool.block_size,
            full=GroupBatch(full_table, nothing, nothing, full_slots, pool.full),
            swa=GroupBatch(swa[1], first_swa.tolist(), self._all.key_floor[self._lines].tolist(), swa[0], pool.swa)
            if pool.swa
            else None,
            wanted=None if all_sampled else Wanted(self._sampling, sampled),
            exact_from=self._exact_from() if pool.swa else None,
        )

    def _exact_from(self) -> list[int] | None:
        """From where on each request's SWA KV must be right, if a request of the step replays a window."""
        every, lines = self._all, self._lines
        rebuilt = every.exact_from[lines] > every.key_floor[lines]
        if not (rebuilt & (self._start < every.write_full_from[lines])).any():
            return None
        return np.where(rebuilt, every.exact_from[lines], NO_REPLAY).tolist()

    def _put_tokens(self, out: Ints) -> None:
        """A request at its last token, which may be sampled, runs that one; the others run a part of what they were
        admitted with."""
        out[self.query_start[:-1]] = self._all.last[self._lines]
        for index, request in enumerate(self._requests):
            if request.num_tokens > 1 or not request.sample:
                first = int(self.query_start[index])
                end = request.start + request.num_tokens
                out[first : first + request.num_tokens] = self._rows[index].tokens[request.start : end]

    def _put_slots(self, out: Ints, table: Ints, size: int) -> None:
        """Where the tokens' KV belongs in the pool of `table`."""
        blocks = table[self._token_lines, self._positions // size]
        out[:] = blocks * size + self._positions % size
