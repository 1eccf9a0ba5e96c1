"""A store in memory that does as it is told: raises, answers nonsense, waits, or changes what it holds."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cygnet.kv.store import DEFAULT_TIMEOUT_S, Namespace, ObjectKey, Outcome
from fakes.store import MemoryStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FaultyStore(MemoryStore):
    """`calls` lists calls by name; `before` and `after` are told of each when it begins and before it returns, and may
    raise or wait. What `answers` has for a name is returned instead of doing anything."""

    def __init__(self, capacity_bytes: int = 64 << 20) -> None:
        super().__init__(capacity_bytes)
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.answers: dict[str, Any] = {}

    def corrupt(self, key: ObjectKey, at: int) -> None:
        """Flip a bit of what is held."""
        body = bytearray(self._objects[key])
        body[at] ^= 1
        self._objects[key] = bytes(body)

    def batch_exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._call("exists", lambda: MemoryStore.batch_exists(self, keys))

    def batch_get_into(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        return self._call("get", lambda: MemoryStore.batch_get_into(self, keys, buffers, timeout_s=timeout_s))

    def batch_put(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        return self._call("put", lambda: MemoryStore.batch_put(self, keys, buffers, timeout_s=timeout_s))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        self._call("touch", lambda: MemoryStore.touch(self, keys))

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        return self._call("remove", lambda: MemoryStore.remove(self, keys))

    def clear(self, namespace: Namespace | None = None) -> int:
        return self._call("clear", lambda: MemoryStore.clear(self, namespace))

    def _call(self, name: str, do: Callable[[], Any]) -> Any:
        self.calls.append(name)
        self.before(name)
        answer = self.answers[name] if name in self.answers else do()
        self.after(name)
        return answer


class Hold:
    """Makes a store's calls of one name wait until they are let go."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered = threading.Semaphore(0)
        self._released = threading.Event()

    def __call__(self, name: str) -> None:
        if name == self._name:
            self._entered.release()
            assert self._released.wait(60)

    def wait(self) -> None:
        """Until a call waits."""
        assert self._entered.acquire(timeout=60)

    def release(self) -> None:
        """Let go those that wait, and all later ones."""
        self._released.set()
