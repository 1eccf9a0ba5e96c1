"""A store worker without threads, over the contents that `FakeRunner` keeps for host blocks."""

from collections.abc import Sequence
from random import Random

from cygnet.kv.store import Group, ObjectKey, Outcome
from cygnet.kv.transfers import (
    Cancel,
    ClearStore,
    Fetch,
    Fetched,
    Found,
    Lookup,
    Put,
    StoreCommand,
    Stored,
    StoreResult,
)


class FakeStoreWorker:
    """Carries out commands some time later, in any order, with a share of faults.

    `objects` is what the store holds. Wrong bytes never come out of a store worker, as it checks them; what it knows to
    be wrong is `TORN`.
    """

    def __init__(
        self, host: dict[Group, dict[int, tuple[object, ...]]], rnd: Random, *, faults: float = 0.0, hang: float = 0.0
    ) -> None:
        self._host = host
        self._random = rnd
        self.faults = faults
        self.hang = hang
        self._waiting: list[StoreCommand] = []
        self._cancelled: set[int] = set()
        self.objects: dict[ObjectKey, tuple[object, ...]] = {}
        self.num_puts = 0

    @property
    def idle(self) -> bool:
        return not self._waiting

    def submit(self, commands: Sequence[StoreCommand]) -> None:
        for command in commands:
            if isinstance(command, Cancel):
                self._cancelled.add(command.ticket)
            elif isinstance(command, ClearStore):
                self.objects.clear()
            else:
                self._waiting.append(command)

    def answers(self, *, everything: bool = False) -> list[StoreResult]:
        """Carry out some of what waits (all of it with `everything`)."""
        if self._random.random() < self.hang and not everything:
            return []
        self._random.shuffle(self._waiting)
        count = len(self._waiting) if everything else self._random.randint(0, len(self._waiting))
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        return [self._answer(command) for command in chosen]

    def _answer(self, command: StoreCommand) -> StoreResult:
        match command:
            case Lookup():
                return self._look_up(command)
            case Fetch(ticket, keys, groups, blocks):
                outcomes = [
                    self._get(key, group, block) for key, group, block in zip(keys, groups, blocks, strict=True)
                ]
                return Fetched(ticket, tuple(Outcome.TIMED_OUT if ticket in self._cancelled else o for o in outcomes))
            case Put(ticket, keys, groups, blocks):
                self.num_puts += len(keys)
                return Stored(ticket, tuple(self._put(k, g, b) for k, g, b in zip(keys, groups, blocks, strict=True)))
        raise AssertionError(f"{command} has no answer")

    def _look_up(self, command: Lookup) -> Found:
        count = 0
        while count < len(command.full) and command.full[count] in self.objects:
            count += 1
        end = command.first + count
        first = max(command.swa_first, end - command.swa_reach)
        keys = command.swa[first - command.swa_first : end - command.swa_first]
        return Found(command.ticket, count, first, tuple(key in self.objects for key in keys))

    def _get(self, key: ObjectKey, group: Group, block: int) -> Outcome:
        if self._random.random() < self.faults:
            self._host[group][block] = ("garbage",)
            return self._random.choice([Outcome.MISS, Outcome.TORN, Outcome.FAILED, Outcome.TIMED_OUT])
        if key not in self.objects:
            return Outcome.MISS
        self._host[group][block] = self.objects[key]
        return Outcome.OK

    def _put(self, key: ObjectKey, group: Group, block: int) -> Outcome:
        if self._random.random() < self.faults:
            return self._random.choice([Outcome.FULL, Outcome.FAILED, Outcome.TIMED_OUT])
        content = self._host[group][block]
        assert self.objects.setdefault(key, content) == content, "an object that exists was put with other contents"
        return Outcome.OK
