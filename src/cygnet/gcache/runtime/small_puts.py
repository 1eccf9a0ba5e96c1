"""Storing many whole objects of one frame, of one chunk at most: taken in together, then put where they belong."""

from collections.abc import Sequence
from types import ModuleType

from cygnet.gcache.arena import Entry
from cygnet.gcache.protocol import ROUTED, FrameHead, Item, Put, unpack_number
from cygnet.gcache.record import checksums, pack_sums
from cygnet.gcache.runtime.cache import Cache


def put_small(cache: Cache, puts: Sequence[Put], data: memoryview, deadline: float) -> list[Item]:
    """Store these; `data` is their values, one after another."""
    items = [Item.TORN] * len(puts)
    whole: list[tuple[int, memoryview, list[int]]] = []
    begin = 0
    for at, put in enumerate(puts):
        value = data[begin : begin + put.value_bytes]
        begin += put.value_bytes
        sums = checksums(put.key, value)
        if pack_sums(sums) == put.sums:
            whole.append((at, value, sums))
    places = cache.reserve_all([puts[at] for at, _, _ in whole], deadline)
    filled: list[tuple[Entry, list[int]]] = []
    for (at, value, sums), place in zip(whole, places, strict=True):
        if isinstance(place, Item):
            items[at] = place
        else:
            cache.arena.value(place)[:] = value
            filled.append((place, sums))
    stored = iter(cache.commit_all(filled, deadline))
    for (at, _, _), place in zip(whole, places, strict=True):
        if not isinstance(place, Item):
            items[at] = next(stored)
    cache.counts.put_all(items)
    return items


def put_compiled(
    cache: Cache, core: ModuleType, head: FrameHead, meta: bytes, data: memoryview, deadline: float
) -> list[Item] | None:
    """The same for a frame as it came; `None`: it has others too, and nothing was done."""
    root, rest = unpack_number(meta) if head.code & ROUTED else (0, meta)
    puts = core.unpack_small_puts(rest, data, head.count)
    if puts is None:
        return None
    whole = [put for put in puts if put[5]]
    places = cache.reserve_all([Put(put[0], put[2], b"", 0, 0, put[3], 0, root) for put in whole], deadline)
    filled: list[tuple[Entry, list[int]]] = []
    spans: list[tuple[int, int, int]] = []
    for (_, begin, size, _, own, _), place in zip(whole, places, strict=True):
        if isinstance(place, Entry):
            spans.append((cache.arena.value_offset(place), begin, size))
            filled.append((place, [own] if size else []))
    cache.arena.memory.fill(spans, data)
    stored = iter(cache.commit_all(filled, deadline))
    ends = iter([place if isinstance(place, Item) else next(stored) for place in places])
    items = [next(ends) if put[5] else Item.TORN for put in puts]
    cache.counts.put_all(items)
    return items
