"""The waiting queue: fewest uncached tokens first, with ageing.

    key = uncached tokens + ageing_tokens_per_s x arrival time

A request that has waited longer by one second goes before one with `ageing_tokens_per_s` fewer uncached tokens. The
wait's part of the key is linear in time, so the order of two requests never changes by waiting: keys are static, and
no request starves, since all that arrive late enough have larger keys.

What a request finds in the cache changes, though. Keys are therefore looked at again in rotation, a few per step, until
all have been since the cache changed last.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator

from cygnet.base.ids import RequestId
from cygnet.engine.request import Request

REFRESH_PER_STEP = 16


class WaitingQueue:
    """Waiting requests in admission order.

    Invariant: `_keys[id]` is the current key of each waiting request; the heap holds that entry, and perhaps outdated
    ones, which are skipped when they surface.
    """

    def __init__(self, ageing_tokens_per_s: int) -> None:
        self._ageing = ageing_tokens_per_s
        self._heap: list[tuple[int, int, RequestId]] = []
        self._keys: dict[RequestId, int] = {}
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()
        self._version = -1
        self._num_current = 0
        """So many requests at the end of the rotation, or more, have the keys that `_version` of the cache gives."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request, num_uncached_tokens: int) -> None:
        """Add `request`, or give it a new key if it waits already."""
        key = num_uncached_tokens * 1_000_000_000 + self._ageing * request.arrival_ns
        if self._keys.get(request.request_id) != key:
            self._keys[request.request_id] = key
            heapq.heappush(self._heap, (key, request.sequence, request.request_id))
        self._requests.setdefault(request.request_id, request)
        if len(self._heap) > 4 * len(self._requests) + 64:
            self._heap = [(key, self._requests[rid].sequence, rid) for rid, key in self._keys.items()]
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        """The request to admit next; it stays in the queue."""
        while self._heap:
            key, _, request_id = self._heap[0]
            if self._keys.get(request_id) == key:
                return self._requests[request_id]
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: RequestId) -> Request | None:
        """Take a request out, whatever its place; `None` if it does not wait."""
        if self._keys.pop(request_id, None) is not None:
            self._num_current = max(0, self._num_current - 1)  # it may have been one of them
        return self._requests.pop(request_id, None)

    def refresh(self, version: int, num_uncached_tokens: Callable[[Request], int]) -> None:
        """Renew the keys of the next few requests in rotation that may have changed, the cache being at `version`."""
        if version != self._version:
            self._version, self._num_current = version, 0
        count = min(REFRESH_PER_STEP, len(self._requests) - self._num_current)
        self._num_current += max(0, count)
        for _ in range(count):
            request_id, request = next(iter(self._requests.items()))
            self._requests.move_to_end(request_id)
            self.push(request, num_uncached_tokens(request))

    def is_current(self, version: int) -> bool:
        """Whether `refresh` would change nothing."""
        return version == self._version and self._num_current >= len(self._requests)

    def audit(self) -> list[str]:
        """All discrepancies between heap, keys and requests."""
        listed = {(key, request_id) for key, _, request_id in self._heap}
        lost = [rid for rid, key in self._keys.items() if (key, rid) not in listed]
        faults = [f"waiting {rid} has no entry in the heap" for rid in lost]
        if self._keys.keys() != self._requests.keys():
            faults.append("waiting keys and requests differ")
        return faults
