"""KV on its way from prefill to decode workers.

A request's prefill worker computes its prompt and says the first token; its decode worker then finds the KV here, as an
engine finds what is in a store: by name, block by block, and fetches into host memory what it has not got, to be loaded
once it has a place on the device. All that is decided by the engine's own tiers; here is only what is offered.

    prefill worker   prompt ████████ first token │ offers the prompt's whole blocks and their last window
    way to it                                    └─── fetch ───┐
    decode worker                                   host memory └ load, the rest of the prompt, second token ...

What is offered is taken to be kept by the prefill worker beside its cache until it has been fetched.
"""

from collections import Counter
from collections.abc import Sequence

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.kv.store import NAMESPACE_BYTES, Group, Namespace, ObjectKey, object_keys


class Handover:
    """What prefill workers offer to those that decode. Every offer is withdrawn once.

    Invariant: `_offered` counts the offers of each object, and has no zeros.
    """

    def __init__(self, namespace: Namespace, sizes: Sequence[int], geometry: KVGeometry, block_size: int) -> None:
        """`sizes` are an object's bytes by group."""
        self.block_size = block_size
        self._namespace, self._sizes = namespace, sizes
        self._window = geometry.window_blocks(block_size) if geometry.has_swa else 0
        self._offered: Counter[ObjectKey] = Counter()

    def __len__(self) -> int:
        return len(self._offered)

    def objects(self, keys: Sequence[BlockKey]) -> list[ObjectKey]:
        """What a decode needs that goes on from the blocks `keys`."""
        full = object_keys(self._namespace, Group.FULL, keys)
        return full + object_keys(self._namespace, Group.SWA, keys[max(0, len(keys) - self._window) :])

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """The KV of these blocks is there, with the window that ends with the last one."""
        self._offered.update(self.objects(keys))

    def withdraw(self, keys: Sequence[BlockKey]) -> None:
        """An offer is not needed any longer."""
        for key in self.objects(keys):
            self._offered[key] -= 1
            if not self._offered[key]:
                del self._offered[key]

    # ---------------------------------------------------------- as a store has it

    def server(self, key: ObjectKey) -> "Handover":
        """Whoever has it."""
        return self

    def holds(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the object is offered."""
        return key in self._offered

    use = holds

    def put(self, key: ObjectKey, now_ns: int) -> bool:
        """Nothing comes back from those that decode."""
        return False

    def size(self, key: ObjectKey) -> int:
        """Bytes of an object of this key's group."""
        return self._sizes[key[NAMESPACE_BYTES]]

    def clear(self) -> None:
        """Lose everything."""
        self._offered.clear()

    def audit(self) -> list[str]:
        """All discrepancies."""
        return [f"hand-over: {count} offers of an object" for count in self._offered.values() if count < 1]
