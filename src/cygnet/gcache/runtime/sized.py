"""Getting an object whose size is not known beforehand."""

from struct import Struct

from cygnet.gcache.protocol import OUTCOMES, Item, Op, ProtocolError, Want, pack_wants, unpack_gots
from cygnet.gcache.record import CHUNK_BYTES, chunk_seed
from cygnet.gcache.runtime.channel import GCacheError, Peer
from cygnet.gcache.runtime.lanes import FAILURES, GOT_BYTES, SUM_BYTES
from cygnet.gcache.runtime.wire import DeadlineError, Piece
from cygnet.kv.store import Outcome


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
                return OUTCOMES.get(Item(got.status), Outcome.FAILED)
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
