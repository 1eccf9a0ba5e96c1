"""A mover that copies when it is let, and says what it does."""

import threading

from cygnet.kv.runtime.movers import CpuMover, Ready
from cygnet.kv.runtime.pieces import Ints
from cygnet.kv.store import Group


class SlowMover(CpuMover):
    """Each load waits for a turn that `let` gives, unless `free`. `told` lists what has been copied, in order; a copy
    named in `fails` fails instead."""

    is_immediate = False

    def __init__(self, *args: object, free: bool = False, told: list[str] | None = None) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.told: list[str] = [] if told is None else told
        self.fails: set[str] = set()
        self._turns = threading.Semaphore(0)
        self._free = free

    def let(self, count: int = 1) -> None:
        """Let this many more loads go on."""
        for _ in range(count):
            self._turns.release()

    def load(self, group: Group, layer: int, host: Ints, device: Ints) -> Ready:
        assert self._free or self._turns.acquire(timeout=60)
        self._tell(f"load {group.name} {layer}")
        return super().load(group, layer, host, device)

    def save(self, group: Group, device: Ints, host: Ints) -> None:
        self._tell(f"save {group.name}")
        super().save(group, device, host)

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what in self.fails:
            raise OSError(f"{what} failed")
