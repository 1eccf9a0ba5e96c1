"""One object: got, of a known size that fits one frame, or of whatever size it is; or put, of one chunk."""

from struct import Struct

from xxhash import xxh3_64_intdigest

from cygnet.gcache.protocol import Item, Op, ProtocolError, Want, pack_wants, unpack_gots
from cygnet.gcache.quick import pack_put_of_one
from cygnet.gcache.record import CHUNK_BYTES, chunk_seed
from cygnet.gcache.runtime.channel import Channel, GCacheError, Peer
from cygnet.gcache.runtime.lanes import FAILURES, GOT_BYTES, LATE_BYTES, SUM_BYTES, copy_one, outcome_of
from cygnet.gcache.runtime.wire import DeadlineError, Piece
from cygnet.kv.store import Outcome


def get_one(peer: Peer, key: bytes, view: memoryview, deadline: float, *, verify: bool) -> Outcome:
    """Fill `view`, of one chunk, from the arena of a local server or over TCP. Other failures are outcomes too."""
    try:
        if peer.may_be_local and peer.is_local(deadline):
            copied = copy_one(peer, key, view, deadline)
            if copied is not Outcome.FAILED:
                return copied
    except FAILURES:
        pass  # TCP may still do
    try:
        with peer.channel(deadline) as channel:
            return outcome_of(channel.get_one(key, view, verify=verify))
    except FAILURES as error:
        return Outcome.TIMED_OUT if isinstance(error, DeadlineError) else Outcome.FAILED


def put_one(peer: Peer, key: bytes, value: memoryview, ttl_ms: int, root: int, deadline: float) -> Outcome:
    """Store an object of one chunk. Failures are outcomes too."""
    try:
        with peer.channel(deadline) as channel:
            return outcome_of(_put(channel, key, value, ttl_ms, root))
    except FAILURES as error:
        return Outcome.TIMED_OUT if isinstance(error, DeadlineError) else Outcome.FAILED


def _put(channel: Channel, key: bytes, value: memoryview, ttl_ms: int, root: int) -> int:
    """Store an object of one chunk; its outcome, an `Item`."""
    request_id, wire, size = channel.next_id(), channel.wire, len(value)
    seed = chunk_seed(key)
    late = wire.core is not None and size > LATE_BYTES
    checksum = b"" if late else xxh3_64_intdigest(value, seed=seed).to_bytes(8, "little")
    head = pack_put_of_one(request_id, channel.epoch, channel.budget_ms(), key, size, ttl_ms, root, checksum)
    if wire.core is not None:
        item = wire.put_one(wire.core, head, request_id, value, seed if late else None)
        if item is not None:
            return item
    else:
        wire.send([head, value])
    _, items = channel.receive(request_id, Op.PUT, 1)
    if len(items) != 1:
        raise ProtocolError("an answer to PUT of another length")
    return items[0]


def get_whole(peer: Peer, key: bytes, deadline: float, max_bytes: int, *, verify: bool) -> bytearray | Outcome:
    """Memory of the object's size, with its first chunk filled in; of a larger one the rest is still to be got."""
    try:
        with peer.channel(deadline) as channel:
            request_id = channel.send(Op.GET, pack_wants([Want(key, num_chunks=1)]), count=1)
            head, meta = channel.receive(request_id, Op.GET, GOT_BYTES + SUM_BYTES)
            got = unpack_gots(meta, 1)[0]
            if got.body_bytes != head.body_bytes:
                raise ProtocolError("an answer whose body is not as long as its object")
            if got.value_bytes > max_bytes:
                raise GCacheError(f"an object of {got.value_bytes} bytes, this client takes {max_bytes}")
            if got.status != Item.OK:
                return outcome_of(got.status)
            memory = bytearray(got.value_bytes)
            if not memory:
                return memory
            piece = Piece(memoryview(memory)[:CHUNK_BYTES], chunk_seed(key), checked=verify)
            channel.wire.read_pieces([piece])
            if verify and Struct("<Q").pack(piece.digest) != got.sums:
                return Outcome.TORN
            return memory
    except FAILURES as error:
        return Outcome.TIMED_OUT if isinstance(error, DeadlineError) else Outcome.FAILED
