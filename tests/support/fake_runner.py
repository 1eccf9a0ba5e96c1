"""A model runner without a model: it keeps what real KV would hold and derives tokens from it.

Its memory says, per slot, which prefix the KV there belongs to. The token it "samples" is a hash of what a request's
tables lead to, so any wrong, stale or missing block changes the output. For SWA it also tracks how many layers' KV is
exact:

    KV of layer j at position p is exact when layers below j saw an exact, whole window there:
    exact(p) = min(num_layers, 1 + min of exact(q) over the window's earlier positions q), a missing one counting 0

which is the error front of a window rebuild.
"""

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import RequestId
from cygnet.engine.plan import NewRequest, SampledToken, StepPlan, StepResult
from cygnet.engine.request import Request
from cygnet.kv.store import Group
from cygnet.kv.transfers import Copies

VOCAB = 50


def prefix_digest(tokens: list[int]) -> bytes:
    return blake2b(repr(tokens).encode(), digest_size=8).digest()


def next_token(tokens: list[int]) -> int:
    """What the imagined model says after `tokens`."""
    return int.from_bytes(prefix_digest(tokens), "little") % VOCAB


class FakeStep:
    """A step of a fake runner."""

    def __init__(self, runner: "FakeRunner", plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def done(self) -> bool:
        return self._runner._done(self._plan)

    def result(self) -> StepResult:
        return self._runner._finish(self._plan)


class FakeRunner:
    """A `StepRunner`; `wrong` lists every read of KV that was not what it should be.

    What happens is told to `tell` as (what, step): "launch" before the step, "result" when that is asked for.
    """

    asynchronous = False

    def __init__(
        self, geometry: KVGeometry, block_size: int, *, tell: Callable[[str, int], None] = lambda what, step: None
    ) -> None:
        self._geometry = geometry
        self._tell = tell
        self._size = block_size
        self._full: dict[int, bytes] = {}
        self._swa: dict[int, tuple[bytes, int]] = {}
        self.host: dict[Group, dict[int, tuple[object, ...]]] = {Group.FULL: {}, Group.SWA: {}}
        """Contents of host blocks, slot by slot."""
        self._rows: dict[RequestId, tuple[NewRequest, list[int], dict[int, int], dict[int, int]]] = {}
        self.wrong: list[str] = []
        self.num_computed = 0
        self._result: StepResult | None = None
        self._pending = False

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> FakeStep:
        if self._pending:
            raise InvariantError("a step is pending")
        self._pending = True
        self._tell("launch", plan.step)
        self._start(plan)
        return FakeStep(self, plan)

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        faults = [] if self._rows.keys() == running.keys() | set(gone) else ["rows of other requests"]
        for request_id in running.keys() & self._rows.keys():
            if self._rows[request_id][1] != running[request_id].token_ids:
                faults.append(f"other tokens of {request_id}")
        return faults

    def _start(self, plan: StepPlan) -> None:
        self._result = self._run_step(plan)

    def _done(self, plan: StepPlan) -> bool:
        return True

    def _finish(self, plan: StepPlan) -> StepResult:
        self._tell("result", plan.step)
        assert self._result is not None
        self._pending = False
        return self._result

    def _run_step(self, plan: StepPlan) -> StepResult:
        moves = plan.transfers
        for group, freed in ((Group.FULL, moves.freed_host_full), (Group.SWA, moves.freed_host_swa)):
            for block in freed:
                self.host[group].pop(block, None)
        self._save(moves.evicted)
        self._poison(plan)
        self._load(moves.loads)
        # At any time while the step runs: before it and behind it are the extremes.
        if plan.step % 2:
            self._save(moves.saves)
        result = self._forward(plan)
        if not plan.step % 2:
            self._save(moves.saves)
        return result

    def _save(self, copies: Copies) -> None:
        for group, pairs in ((Group.FULL, copies.full), (Group.SWA, copies.swa)):
            device = self._full if group is Group.FULL else self._swa
            for source, target in pairs:
                slots = range(source * self._size, (source + 1) * self._size)
                self.host[group][target] = tuple(device.get(slot) for slot in slots)

    def _load(self, copies: Copies) -> None:
        for group, pairs in ((Group.FULL, copies.full), (Group.SWA, copies.swa)):
            device: dict = self._full if group is Group.FULL else self._swa
            for source, target in pairs:
                for place, content in enumerate(self.host[group][source]):
                    device[target * self._size + place] = content

    def _poison(self, plan: StepPlan) -> None:
        for block in plan.freed_full:
            for slot in range(block * self._size, (block + 1) * self._size):
                self._full.pop(slot, None)
        for block in plan.freed_swa:
            for slot in range(block * self._size, (block + 1) * self._size):
                self._swa.pop(slot, None)

    def _forward(self, plan: StepPlan) -> StepResult:
        for request_id in plan.gone:
            self._rows.pop(request_id, None)
        for new in plan.new:
            self._rows[new.request_id] = (new, list(new.token_ids), {}, {})
        written: set[tuple[str, int]] = set()
        for request in plan.requests:
            _, _, full, swa = self._rows[request.request_id]
            full.update(enumerate(request.new_full_blocks, request.full_offset))
            swa.update(enumerate(request.new_swa_blocks, request.swa_offset))
        sampled = {}
        for request in plan.requests:
            new, tokens, full, swa = self._rows[request.request_id]
            good = True
            for position in range(request.start, request.start + request.num_tokens):
                good = self._run(new, tokens, position, full, swa, written)
                self.num_computed += 1
            if request.sample:
                assert request.start + request.num_tokens == len(tokens)
                token = next_token(tokens) if good else VOCAB  # an impossible token
                tokens.append(token)
                sampled[request.request_id] = SampledToken(token)
        return StepResult(plan.step, sampled)

    def _slot(self, table: dict[int, int], position: int) -> int:
        return table[position // self._size] * self._size + position % self._size

    def _run(
        self,
        new: NewRequest,
        tokens: list[int],
        position: int,
        full: dict[int, int],
        swa: dict[int, int],
        written: set[tuple[str, int]],
    ) -> bool:
        """Compute one token's KV; whether all that its layers read was right and exact."""
        if position >= new.write_full_from:
            slot = self._slot(full, position)
            if ("full", slot) in written:
                self.wrong.append(f"{new.request_id}: full slot {slot} written twice in a step")
            written.add(("full", slot))
            self._full[slot] = prefix_digest(tokens[: position + 1])
        good = True
        for earlier in range(position + 1):
            if self._full.get(self._slot(full, earlier)) != prefix_digest(tokens[: earlier + 1]):
                self.wrong.append(f"{new.request_id}: full KV of {earlier} read at {position} is not there")
                good = False
        if not self._geometry.has_swa:
            return good
        layers, window = self._geometry.swa.num_layers, self._geometry.window
        exact = layers
        for earlier in range(max(0, position - window), position):
            if earlier < new.key_floor:
                exact = 0
                continue
            content = self._swa.get(self._slot(swa, earlier))
            if content is None or content[0] != prefix_digest(tokens[: earlier + 1]):
                self.wrong.append(f"{new.request_id}: SWA KV of {earlier} read at {position} is not there")
                return False
            exact = min(exact, content[1])
        slot = self._slot(swa, position)
        if ("swa", slot) in written:
            self.wrong.append(f"{new.request_id}: SWA slot {slot} written twice in a step")
        written.add(("swa", slot))
        self._swa[slot] = (prefix_digest(tokens[: position + 1]), min(layers, 1 + exact))
        return good and exact == layers


class LateRunner(FakeRunner):
    """A fake runner whose device takes its time: all work is done at the last moment, when the result is asked for.

    It is seen working `looks` times per step, each of them told as "working". The step numbered `fails_at` fails on the
    device.
    """

    asynchronous = True

    def __init__(
        self,
        geometry: KVGeometry,
        block_size: int,
        *,
        tell: Callable[[str, int], None] = lambda what, step: None,
        looks: int = 3,
        fails_at: int = -1,
    ) -> None:
        super().__init__(geometry, block_size, tell=tell)
        self._looks = looks
        self._fails_at = fails_at
        self._left = 0

    def _start(self, plan: StepPlan) -> None:
        self._left = self._looks

    def _done(self, plan: StepPlan) -> bool:
        if self._left > 0:
            self._left -= 1
            self._tell("working", plan.step)
            return False
        return True

    def _finish(self, plan: StepPlan) -> StepResult:
        if plan.step == self._fails_at:
            raise RuntimeError("the device failed")
        self._result = self._run_step(plan)
        return super()._finish(plan)
