"""Objects of a server on the same machine, read where they lie."""

from collections.abc import Callable
from types import TracebackType

from cygnet.base.errors import CygnetError
from cygnet.gcache.record import PAGE, SLOT_WORDS


class StaleViewError(CygnetError):
    """A view was used for longer than its lease, and its memory has been given to another object meanwhile."""


class MappedArena:
    """A server's arena, mapped for reading."""

    def __init__(self, memory: memoryview, stamped: Callable[[int], int] | None = None) -> None:
        self.memory = memory
        self._words = memory[PAGE:].cast("Q")
        self.generation = stamped or self._generation

    def _generation(self, slot: int) -> int:
        """Of the object in a slot: rises before the memory of the one before is used again."""
        return self._words[slot * SLOT_WORDS] >> 2


class View:
    """One object's bytes in the arena, read-only, without a copy.

    The server keeps them in place until the view is released, or its lease is over. Whatever was made of `data` counts
    only if `is_valid()` afterwards; as a context manager, leaving it raises `StaleViewError` when it does not.
    """

    __slots__ = ("_arena", "_generation", "_give_back", "_lease", "_slot", "data")

    def __init__(
        self,
        arena: MappedArena,
        slot: int,
        stamp: int,
        offset: int,
        num_bytes: int,
        give_back: Callable[[int], None],
        lease: int,
    ) -> None:
        self.data = arena.memory[offset : offset + num_bytes]
        self._arena = arena
        self._slot = slot
        self._generation = stamp >> 2
        self._lease: int | None = lease
        self._give_back = give_back

    def is_valid(self) -> bool:
        """Whether the bytes read so far were the object's."""
        return self._arena.generation(self._slot) == self._generation

    def release(self) -> None:
        """Let the server move the object. `data` is not to be used any more. May be called twice."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._give_back(lease)

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        valid = self.is_valid()
        self.release()
        if not valid and kind is None:
            raise StaleViewError("the view's lease ran out while it was used; read in less time, or get a copy")
