"""A named table of things that register themselves: model families, attention backends, policies."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from cygnet.base.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to one implementation. One extension is one new file that calls `register`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: add the decorated object under `name`. A name taken twice is a `ValueError`."""

        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def get(self, name: str) -> T:
        """The item called `name`; `ConfigError` names the nearest match."""
        try:
            return self._items[name]
        except KeyError:
            near = get_close_matches(name, self._items, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}; {hint}known: {', '.join(sorted(self._items))}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
