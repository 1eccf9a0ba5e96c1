"""A server's answers to frames about one object, by the shortest way.

What is not exactly such a frame, or needs the disk, is left to `Connection`, and nothing has been done.
"""

import time

from cygnet.gcache.arena import Entry
from cygnet.gcache.protocol import Item, Op, pack_answer
from cygnet.gcache.quick import pack_got_one, pack_viewed_one, unpack_one, unpack_put_of_one
from cygnet.gcache.record import chunk_seed
from cygnet.gcache.runtime.service import DEFAULT_BUDGET_S, Service
from cygnet.gcache.runtime.wire import Piece, Wire


def answer_one(wire: Wire, service: Service, owner: int, frame: memoryview) -> bool:
    """Answer a frame that begins so, if it is about one object; `False` leaves it to the general way."""
    if frame[4] == Op.PUT:
        return _put(wire, service, frame)
    asked = unpack_one(frame)
    if asked is None or not service.cluster.answers(asked.epoch):
        return False
    cache = service.cache
    if asked.op == Op.VIEW:
        found = cache.memory.lease((asked.key,), owner, (asked.released,), asked.value_bytes)[0]
        if found is None:
            return False
        entry, lease = found
        offset = cache.arena.value_offset(entry)
        where = (entry.slot, offset, entry.value_bytes, entry.stamp, lease)
        wire.drop()
        wire.arm(time.monotonic() + cache.limits.frame_timeout_s)
        wire.send_bytes(pack_viewed_one(asked.request_id, service.cluster.epoch, *where))
        return True
    held = cache.memory.acquire_now(asked.key, asked.value_bytes)
    if held is None:
        return False
    try:
        wire.drop()
        wire.arm(time.monotonic() + cache.limits.frame_timeout_s)
        checksum = int.from_bytes(cache.arena.sums(held, 0, 1), "little")
        head = pack_got_one(asked.request_id, service.cluster.epoch, held.value_bytes, held.version, checksum)
        wire.send([head, cache.arena.value(held)])
    finally:
        cache.memory.release([held])
    return True


def _put(wire: Wire, service: Service, frame: memoryview) -> bool:
    """Store one object of one chunk; `False` leaves that to the general way, and nothing has been done."""
    asked = unpack_put_of_one(frame)
    if asked is None or service.cluster.name:
        return False
    cache = service.cache
    now = time.monotonic()
    deadline = now + (asked.budget_ms / 1000 if asked.budget_ms else DEFAULT_BUDGET_S)
    wire.arm(now + cache.limits.frame_timeout_s)
    entry = cache.reserve(asked.key, asked.value_bytes, asked.ttl_ms, deadline, asked.root)
    item, done = Item.TORN, False
    try:
        wire.skip(asked.frame_bytes)
        target = cache.arena.value(entry) if isinstance(entry, Entry) else memoryview(bytearray(asked.value_bytes))
        value, tail = Piece(target, chunk_seed(asked.key)), bytearray(asked.checksum or 8)
        wire.read_pieces([value] if asked.checksum else [value, Piece(memoryview(tail), checked=False)])
        done = isinstance(entry, Entry) and value.digest == int.from_bytes(tail, "little")
        if isinstance(entry, Item):
            item = entry
        elif done:
            item = cache.commit(entry, [value.digest], deadline)
    finally:
        if isinstance(entry, Entry) and not done:
            cache.abandon(entry)
    cache.counts.put(item)
    wire.arm(time.monotonic() + cache.limits.frame_timeout_s)
    wire.send_bytes(pack_answer(Op.PUT, asked.request_id, bytes((item,)), count=1))
    return True
