"""What moves between the tiers, as the pure side decides it: copies of a step, and commands to the store. Pure.

    device (L1)  ◄── StepTransfers: within a step ──►  host (L2)  ◄── StoreCommands: in their own time ──►  store (L3)

Copies between device and host belong to a step and are done when its result is there, so nothing can be freed, aborted
or evicted under them. What the store does takes as long as it takes; its results come back between two steps, and until
then the host blocks concerned stay allocated to the command.

One *object* is the KV of one block of one group, all layers side by side, as it lies in host memory and in the store:

    | layer 0: K | V | layer 1: K | V | ... | zeros | checksum |          K [block_size, kv_heads, key_dim], V likewise

The checksum is over the object's key and all bytes before it. Whatever a store hands out, wrong bytes are a miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockId
from cygnet.kv.store import Group, ObjectKey, Outcome

OBJECT_ALIGNMENT = 512
"""Objects are laid out in multiples of this, so that a disk can read and write them in place."""
CHECKSUM_BYTES = 8


def object_bytes(group: GroupGeometry, block_size: int) -> int:
    """Bytes of one object in host memory and in the store; 0 where the group has no layers."""
    payload = group.block_bytes(block_size)
    return -(-(payload + CHECKSUM_BYTES) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT if payload else 0


def group_geometry(geometry: KVGeometry, group: Group) -> GroupGeometry:
    """The shape of one group."""
    return geometry.full if group is Group.FULL else geometry.swa


Pair = tuple[BlockId, BlockId]
"""(from, to)"""


@dataclass(frozen=True, slots=True)
class Copies:
    """Whole blocks to copy from one tier's pools to another's, per group."""

    full: tuple[Pair, ...] = ()
    swa: tuple[Pair, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.full or self.swa)

    def __len__(self) -> int:
        return len(self.full) + len(self.swa)


NO_COPIES = Copies()


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """Copies that go with one step, in this order:

    1. `evicted`, device to host: before anything else, as the device blocks read have new owners who will write them;
    2. `loads`, host to device: layer by layer, each layer's before that layer's attention of the same step;
    3. `saves`, device to host: at any time while the step runs; nobody writes what they read.
    """

    evicted: Copies = NO_COPIES
    loads: Copies = NO_COPIES
    saves: Copies = NO_COPIES
    freed_host_full: tuple[BlockId, ...] = ()
    """Host blocks that are free now, to poison before the copies (only when poisoning is on)."""
    freed_host_swa: tuple[BlockId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.evicted or self.loads or self.saves or self.freed_host_full or self.freed_host_swa)


NO_TRANSFERS = StepTransfers()


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask which objects of one sequence the store has.

        block index     swa_first ....... first ............................. first + len(full)
        full                              ├── how many of these, from the left, are there?
        swa             ├── which of the last `swa_reach` before where `full` ends?

    Answered by `Found`.
    """

    ticket: int
    first: int
    full: tuple[ObjectKey, ...]
    swa_first: int
    swa: tuple[ObjectKey, ...]
    swa_reach: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a `Lookup` found."""

    ticket: int
    num_full: int
    """Leading objects of `Lookup.full` that are there."""
    swa_first: int
    """Block index of `swa[0]`."""
    swa: tuple[bool, ...]
    """For each block from `swa_first` to `first + num_full`: whether its SWA object is there."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read objects into host blocks. What has not begun by `deadline_ns` (of the engine's clock) is not begun.

    Answered by `Fetched`; the blocks are the command's until then.
    """

    ticket: int
    keys: tuple[ObjectKey, ...]
    groups: tuple[Group, ...]
    blocks: tuple[BlockId, ...]
    deadline_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Outcome per object of a `Fetch`. `OK` means that the checksum was right."""

    ticket: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Write objects from host blocks. Answered by `Stored`; nobody writes the blocks until then."""

    ticket: int
    keys: tuple[ObjectKey, ...]
    groups: tuple[Group, ...]
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome per object of a `Put`."""

    ticket: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """What has not begun of the `Lookup` or `Fetch` with this ticket need not begin. It is answered all the same."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ClearStore:
    """Give up all objects of this model. Not answered."""


StoreCommand = Lookup | Fetch | Put | Cancel | ClearStore
StoreResult = Found | Fetched | Stored


@dataclass(slots=True)
class Outbox:
    """Store commands decided on and not yet taken by the runtime, oldest first."""

    commands: list[StoreCommand] = field(default_factory=list)
    num_tickets: int = 0

    def new_ticket(self) -> int:
        """A number for a command and its answer."""
        self.num_tickets += 1
        return self.num_tickets

    def take(self) -> Sequence[StoreCommand]:
        """All of them; the outbox is empty after."""
        taken, self.commands = self.commands, []
        return taken
