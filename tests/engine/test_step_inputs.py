"""A step's tensors against the plainest way to make them: request by request, token by token, from lists."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from cygnet.base.ids import BlockId, RequestId
from cygnet.base.sampling import SamplingParams
from cygnet.engine.plan import NewRequest, SampledToken, ScheduledRequest
from cygnet.engine.runtime.rows import Rows
from cygnet.engine.runtime.step_device import PlainDevice, Staging
from cygnet.engine.runtime.step_inputs import StepInputs
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.batch import NO_REPLAY, GroupBatch
from support.tiny_model import WINDOW, tiny_model

SIZE = 4


@dataclass
class Plain:
    """What `Rows` keeps of a request, in lists."""

    tokens: list[int]
    write_full_from: int
    key_floor: int
    exact_from: int
    full: list[int] = field(default_factory=list)
    swa: list[int] = field(default_factory=list)
    computed: int = 0


class Walk:
    """Random requests that come, run and go, in the rows and in lists."""

    def __init__(self, seed: int, longest: int, most: int) -> None:
        self.rnd = Random(seed)
        self.longest = longest
        self.most = most
        self.rows = Rows()
        self.plain: dict[RequestId, Plain] = {}
        self.staging = Staging(PlainDevice(torch.device("cpu")))
        geometry = tiny_model(TorchBackend()).description.kv_geometry(4)
        self.pool = DevicePool(geometry, PoolSizes(SIZE, 1, 1, 1), dtype=torch.float32, device="cpu")
        self.count = 0

    def come(self) -> None:
        self.count += 1
        tokens = [self.rnd.randrange(1000) for _ in range(self.rnd.randint(1, self.longest))]
        computed = self.rnd.randrange(len(tokens))
        floor = self.rnd.choice([0, computed])
        plain = Plain(tokens, self.rnd.choice([0, computed, len(tokens)]), floor, floor + self.rnd.choice([0, 0, 3]))
        plain.computed = computed
        name = RequestId(f"r{self.count}")
        self.plain[name] = plain
        params = SamplingParams(temperature=0.0)
        floors = plain.write_full_from, plain.key_floor, plain.exact_from
        self.rows.add(NewRequest(name, tuple(tokens), len(tokens), params, *floors), ())

    def go(self) -> None:
        name = self.rnd.choice(list(self.plain))
        del self.plain[name]
        self.rows.remove(name)

    def schedule(self) -> list[ScheduledRequest]:
        """Some of the requests, in any order, with one token or several."""
        requests = []
        for name in self.rnd.sample(list(self.plain), self.rnd.randint(1, len(self.plain))):
            plain = self.plain[name]
            left = len(plain.tokens) - plain.computed
            count = left if self.rnd.random() < 0.6 else self.rnd.randint(1, left)
            blocks = -(-(plain.computed + count) // SIZE)
            live = max(0, max(plain.key_floor, plain.computed - WINDOW)) // SIZE
            swa_offset = max(len(plain.swa), live)
            full = tuple(BlockId(self.rnd.randrange(1, 10**6)) for _ in range(blocks - len(plain.full)))
            swa = tuple(BlockId(self.rnd.randrange(1, 10**6)) for _ in range(blocks - swa_offset))
            requests.append(
                ScheduledRequest(
                    name,
                    plain.computed,
                    count,
                    len(plain.full),
                    full,
                    swa_offset,
                    swa,
                    plain.computed + count == len(plain.tokens),
                )
            )
            plain.full += full
            plain.swa += [-1] * (swa_offset - len(plain.swa)) + list(swa)
        return requests

    def finish(self, requests: Sequence[ScheduledRequest]) -> None:
        sampled = [r.request_id for r in requests if r.sample]
        new = [self.rnd.randrange(1000) for _ in sampled]
        self.rows.append([self.rows[name] for name in sampled], [SampledToken(token) for token in new])
        for request in requests:
            self.plain[request.request_id].computed += request.num_tokens
        for name, token in zip(sampled, new, strict=True):
            self.plain[name].tokens.append(token)

    def check(self, requests: Sequence[ScheduledRequest]) -> None:
        self.rows.take_blocks(requests)
        inputs = StepInputs(requests, self.rows)
        batch = inputs.batch(self.pool, self.staging, window=WINDOW)
        rows = [self.plain[r.request_id] for r in requests]
        spans = [range(r.start, r.start + r.num_tokens) for r in requests]
        pairs = list(zip(rows, spans, strict=True))
        assert batch.token_ids.tolist() == [row.tokens[p] for row, span in pairs for p in span]
        assert batch.positions.tolist() == [p for span in spans for p in span]
        assert batch.seq_lens == [span.stop for span in spans]
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + len(span))
        assert batch.query_start == starts
        ends = [end - 1 for end, r in zip(starts[1:], requests, strict=True) if r.sample]
        if batch.wanted is None:
            assert ends == list(range(batch.num_tokens))
        else:
            assert batch.wanted.rows.tolist() == ends
            assert batch.wanted.requests == [index for index, r in enumerate(requests) if r.sample]
        assert [name for name, _ in inputs.sampled] == [r.request_id for r in requests if r.sample]
        zeros = [0] * len(rows)
        slots = [
            -1 if p < row.write_full_from else row.full[p // SIZE] * SIZE + p % SIZE
            for row, span in pairs
            for p in span
        ]
        self._check_group(batch.full, [row.full for row in rows], zeros, zeros, slots, spans)
        floors = [row.key_floor for row in rows]
        firsts = [max(row.key_floor, span.start - WINDOW) // SIZE for row, span in pairs]
        slots = [row.swa[p // SIZE] * SIZE + p % SIZE for row, span in pairs for p in span]
        assert batch.swa is not None
        self._check_group(batch.swa, [row.swa for row in rows], firsts, floors, slots, spans)

        replays = [row.exact_from > row.key_floor for row in rows]
        now = any(again and span.start < row.write_full_from for again, (row, span) in zip(replays, pairs, strict=True))
        exact = [row.exact_from if again else NO_REPLAY for again, row in zip(replays, rows, strict=True)]
        assert batch.exact_from == (exact if now else None)

    def _check_group(
        self,
        group: GroupBatch,
        tables: list[list[int]],
        firsts: list[int],
        floors: list[int],
        slots: list[int],
        spans: list[range],
    ) -> None:
        assert group.first_block == firsts
        assert group.key_floor == floors
        assert group.slot_mapping.tolist() == slots
        widths = [-(-span.stop // SIZE) - first for first, span in zip(firsts, spans, strict=True)]
        assert group.block_table.shape == (len(tables), max(widths))
        for line, table, first, width in zip(group.block_table.tolist(), tables, firsts, widths, strict=True):
            assert line[:width] == table[first : first + width]
            assert min(line) >= 0, "what pads a line is a block too"


@pytest.mark.parametrize(("seed", "longest", "most"), [(1, 30, 5), (2, 30, 5), (3, 700, 6), (4, 12, 150), (5, 1, 3)])
def test_against_lists(seed: int, longest: int, most: int) -> None:
    """Rows come and go, tables grow, lines are used again and become more."""
    walk = Walk(seed, longest, most)
    for _ in range(60):
        for _ in range(walk.rnd.randrange(1 + most // 2)):
            if len(walk.plain) < most:
                walk.come()
        if len(walk.plain) > 1 and walk.rnd.random() < 0.5:
            walk.go()
        if walk.plain:
            requests = walk.schedule()
            walk.check(requests)
            walk.finish(requests)
    assert walk.count > most, "lines were used again"
