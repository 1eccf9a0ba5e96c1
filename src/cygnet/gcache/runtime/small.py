"""Frames of many small objects, by the compiled core: no step of the interpreter for each object but its outcome."""

from collections.abc import Iterator, Sequence

from cygnet.gcache.protocol import OUTCOMES, Item, Op, ProtocolError
from cygnet.gcache.runtime.channel import Channel
from cygnet.kv.store import Outcome

KEYS_PER_FRAME = 64
"""So that the server works on one while the client works on the next."""
BYTES_PER_FRAME = 1 << 20
SMALL_BYTES = 128 << 10
"""Larger ones are better hashed while they are on their way."""
_OUTCOMES = {int(item): outcome for item, outcome in OUTCOMES.items()}


class _Small:
    """Objects of one chunk at most, by their places in a batch, whose outcomes are put there."""

    def __init__(
        self, keys: Sequence[bytes], views: Sequence[memoryview], places: list[int], outcomes: list[Outcome | None]
    ) -> None:
        self._keys = [keys[at] for at in places]
        self._views = [views[at] for at in places]
        self._places = places
        self._outcomes = outcomes
        self._request_id = 0

    def _end(self, items: bytes) -> None:
        if len(items) != len(self._places):
            raise ProtocolError("an answer with another number of objects")
        if not any(items):  # all are Item.OK
            for at in self._places:
                self._outcomes[at] = Outcome.OK
            return
        for at, item in zip(self._places, items, strict=True):
            if item not in _OUTCOMES:
                raise ProtocolError(f"an object's status {item}, which is none")
            self._outcomes[at] = _OUTCOMES[item]

    def fail(self, item: Item) -> None:
        """It was not answered."""
        for at in self._places:
            self._outcomes[at] = OUTCOMES[item]


class SmallGets(_Small):
    """Fills buffers of known sizes. `torn` is told the places of what arrived damaged."""

    def __init__(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        places: list[int],
        outcomes: list[Outcome | None],
        torn: list[int],
        *,
        verify: bool,
    ) -> None:
        super().__init__(keys, views, places, outcomes)
        self._torn = torn
        self._verify = verify

    def send(self, channel: Channel) -> None:
        """Send the request."""
        self._request_id = _send_gets(channel, self._keys, self._views)

    def receive(self, channel: Channel) -> None:
        """Read the answer into the buffers."""
        items = _take_gots(channel, self._request_id, self._keys, self._views, verify=self._verify)
        self._end(items)
        if Item.TORN in items:
            self._torn += [at for at, item in zip(self._places, items, strict=True) if item == Item.TORN]


class SmallPuts(_Small):
    """Stores buffers."""

    def __init__(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        places: list[int],
        outcomes: list[Outcome | None],
        ttl_ms: int,
        root: int,
    ) -> None:
        super().__init__(keys, views, places, outcomes)
        self._ttl_ms = ttl_ms
        self._root = root

    def send(self, channel: Channel) -> None:
        """Send the request."""
        self._request_id = _send_puts(channel, self._keys, self._views, self._ttl_ms, self._root)

    def receive(self, channel: Channel) -> None:
        """Read the answer."""
        _, items = channel.receive(self._request_id, Op.PUT, len(self._places))
        self._end(items)


def small_and_large(views: Sequence[memoryview], places: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Places of what such frames take, frame by frame, and of what they don't."""
    small = [at for at in places if len(views[at]) <= SMALL_BYTES]
    large = [at for at in places if len(views[at]) > SMALL_BYTES]
    return list(_frames(views, small)), large


def _frames(views: Sequence[memoryview], places: Sequence[int]) -> Iterator[list[int]]:
    frame: list[int] = []
    size = 0
    for at in places:
        if frame and (size + len(views[at]) > BYTES_PER_FRAME or len(frame) == KEYS_PER_FRAME):
            yield frame
            frame, size = [], 0
        frame.append(at)
        size += len(views[at])
    if frame:
        yield frame


def _send_gets(channel: Channel, keys: list[bytes], views: list[memoryview]) -> int:
    """Ask for whole objects of one chunk at most, of these sizes; needs the core. Returns the request's id."""
    request_id, wire = channel.next_id(), channel.wire
    assert wire.core is not None
    wire.sent(wire.run(wire.core.send_gets, request_id, channel.epoch, channel.budget_ms(), keys, views))
    return request_id


def _take_gots(channel: Channel, request_id: int, keys: list[bytes], views: list[memoryview], *, verify: bool) -> bytes:
    """The answer to `send_gets`: an `Item` for each object."""
    wire = channel.wire
    assert wire.core is not None
    taken = wire.run(wire.core.take_gots, request_id, keys, views, verify, wire.take_read())
    if taken is None:
        raise ProtocolError("an answer to GET with other objects than were asked for")
    wire.sent(taken is not False)
    items, read = taken
    wire.unread(read)
    if items is not None:
        return bytes(items)
    channel.receive(request_id, Op.GET)
    raise ProtocolError("an answer to GET with another number of objects")


def _send_puts(channel: Channel, keys: list[bytes], views: list[memoryview], ttl_ms: int, root: int) -> int:
    """Store objects of one chunk at most; needs the core. Returns the request's id."""
    request_id, wire = channel.next_id(), channel.wire
    assert wire.core is not None
    budget_ms = channel.budget_ms()
    wire.sent(wire.run(wire.core.send_puts, request_id, channel.epoch, budget_ms, ttl_ms, root, keys, views))
    return request_id
