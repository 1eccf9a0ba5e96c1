"""The runner's memory of running requests: arrays that grow in place, from which a step's inputs are gathered."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from cygnet.base.ids import RequestId
from cygnet.engine.plan import NewRequest, SampledToken, ScheduledRequest
from cygnet.engine.request import Request
from cygnet.engine.runtime.sampler import SamplingState
from cygnet.engine.runtime.step_device import Ints

FIRST_LINES, FIRST_BLOCKS = 64, 64


class Row:
    """What is kept of one running request outside the arrays."""

    def __init__(self, line: int, new: NewRequest, stop_ids: tuple[int, ...]) -> None:
        self.line = line
        self.tokens = np.array(new.token_ids, dtype=np.int64)
        """Those known at admission. Of later ones only the last is ever run."""
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sampling = SamplingState(new.sampling, stop_ids, new.num_prompt_tokens)
        self.sampling.start(new.token_ids)


class Rows:
    """A row per running request. What a step reads of every row lies in arrays, a line for each:

        line   num_tokens  last  write_full_from  key_floor  exact_from   full             swa
        3             801    17                0          0           0   b7 b2 b9 b4 ...  --  --  s5  s1 ...  by block

    A step of decodes thus costs a few gathers, however long the tables are, and new blocks are all that is written.

    Invariants (`audit`): every row has a line of its own, the other lines are free; what is in a row and its line is
    the request's. All entries of the tables are ids of blocks that exist, or once did: where a request has no block
    stands 0, or what was there before.
    """

    def __init__(self) -> None:
        self._rows: dict[RequestId, Row] = {}
        self._free = list(range(FIRST_LINES))[::-1]
        self.num_tokens, self.last = (_zeros(FIRST_LINES) for _ in range(2))
        self.write_full_from, self.key_floor, self.exact_from = (_zeros(FIRST_LINES) for _ in range(3))
        self.full, self.swa = (_zeros(FIRST_LINES, FIRST_BLOCKS) for _ in range(2))

    def __getitem__(self, request_id: RequestId) -> Row:
        return self._rows[request_id]

    def add(self, new: NewRequest, stop_ids: tuple[int, ...]) -> None:
        """Make the row of a request that has none. `stop_ids` are those that `min_tokens` holds back."""
        if not self._free:
            self._more_lines()
        row = self._rows[new.request_id] = Row(self._free.pop(), new, stop_ids)
        self.num_tokens[row.line] = len(new.token_ids)
        self.last[row.line] = new.token_ids[-1]
        self.write_full_from[row.line] = new.write_full_from
        self.key_floor[row.line] = new.key_floor
        self.exact_from[row.line] = new.exact_from

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, if it is known."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.line)

    def take_blocks(self, requests: Iterable[ScheduledRequest]) -> None:
        """Put new blocks into the tables."""
        for request in requests:
            if request.new_full_blocks:
                self.full = _put(
                    self.full, self._rows[request.request_id].line, request.full_offset, request.new_full_blocks
                )
            if request.new_swa_blocks:
                self.swa = _put(
                    self.swa, self._rows[request.request_id].line, request.swa_offset, request.new_swa_blocks
                )

    def append(self, rows: Sequence[Row], tokens: Sequence[SampledToken]) -> None:
        """A new last token for each of the rows."""
        lines = [row.line for row in rows]
        self.last[lines] = [token.token_id for token in tokens]
        self.num_tokens[lines] += 1
        for row, token in zip(rows, tokens, strict=True):
            if row.sampling.counts_outputs:
                row.sampling.append(token.token_id)

    def gather_full(self, lines: Ints, out: Ints) -> None:
        """The first blocks of each line, as many as `out` [lines, blocks] has columns."""
        # numpy would copy the whole table first.
        torch.index_select(
            torch.from_numpy(self.full)[:, : out.shape[1]], 0, torch.from_numpy(lines), out=torch.from_numpy(out)
        )

    def gather_swa(self, lines: Ints, first: Ints, out: Ints) -> None:
        """Blocks of each line from block index `first` [lines] on, as many as `out` [lines, blocks] has columns."""
        places = (lines * self.swa.shape[1] + first)[:, None] + np.arange(out.shape[1])
        np.take(self.swa.ravel(), places, out=out, mode="clip")  # past the table's end no row has a block to read

    def _more_lines(self) -> None:
        lines = len(self.last)
        self._free = list(range(lines, 2 * lines))[::-1]
        for name in ("num_tokens", "last", "write_full_from", "key_floor", "exact_from", "full", "swa"):
            old = getattr(self, name)
            setattr(self, name, _grown(old, (2 * lines, *old.shape[1:])))

    # ------------------------------------------------------------------- audit

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId], block_size: int) -> list[str]:
        """All discrepancies between the rows and the core's running requests, and within the lines."""
        expected = running.keys() | set(gone)
        faults = [f"the runner has a row of {rid}, which does not run" for rid in self._rows.keys() - expected]
        faults += [f"the runner has no row of {rid}" for rid in expected - self._rows.keys()]
        used = [row.line for row in self._rows.values()]
        if sorted(used + self._free) != list(range(len(self.last))):
            faults.append(
                f"{len(used)} used and {len(self._free)} free lines of the runner are not its {len(self.last)}"
            )
        for request_id in running.keys() & self._rows.keys():
            faults += self._audit_row(running[request_id], block_size)
        return faults

    def _audit_row(self, request: Request, block_size: int) -> list[str]:
        row, kv, tokens = self._rows[request.request_id], request.kv, request.token_ids
        line, full, live = row.line, len(kv.full_blocks), slice(kv.live_from, len(kv.swa_blocks))
        checks = (
            ("tokens", row.tokens.tolist() == tokens[: len(row.tokens)]),
            ("number of tokens", self.num_tokens[line] == len(tokens)),
            ("last token", self.last[line] == tokens[-1]),
            ("prompt length", row.num_prompt_tokens == request.num_prompt_tokens),
            ("cached prefix", self.write_full_from[line] == kv.num_hit_blocks * block_size),
            ("key floor", self.key_floor[line] == kv.key_floor),
            ("start of right SWA KV", self.exact_from[line] == kv.exact_from),
            ("full block table", self.full[line, :full].tolist() == kv.full_blocks),
            ("SWA block table", self.swa[line, live].tolist() == kv.swa_blocks[live]),
            ("output counts", row.sampling.counts_agree(tokens)),
        )
        return [f"the runner's row of {request.request_id} has another {what}" for what, good in checks if not good]


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)


def _grown(array: Ints, shape: tuple[int, ...]) -> Ints:
    """A larger array that begins with `array`."""
    larger = _zeros(*shape)  # untouched, and so without memory, where nothing is written
    larger[tuple(slice(extent) for extent in array.shape)] = array
    return larger


def _put(table: Ints, line: int, offset: int, blocks: Sequence[int]) -> Ints:
    """`table` with `blocks` in `line` from `offset` on; wider by doubling when they don't fit."""
    end = offset + len(blocks)
    if end > table.shape[1]:
        table = _grown(table, (len(table), max(end, 2 * table.shape[1])))
    table[line, offset:end] = blocks
    return table
