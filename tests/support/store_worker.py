"""A process that uses a disk store, for tests: `python -m support.store_worker FOLDER CAPACITY ROLE SEED`.

`write` puts objects for ever, in batches, and prints each batch once it is acknowledged: `FIRST COUNT`.
`mixed` puts and gets for a while, its own and others' objects, and prints `done` when all it got was right.
`serve` obeys: reads names from standard input, line by line, puts each and prints it.
"""

import sys
from pathlib import Path

import numpy as np

from contracts.store import key, payload
from cygnet.kv.store import Outcome
from support.store_folder import small_store

LENGTHS = (1, 100, 4096, 5000, 14_000)


def body(name: int) -> np.ndarray:
    """The bytes of object `name`."""
    return payload(key(name), LENGTHS[name % len(LENGTHS)])


def write(folder: Path, capacity: int, seed: int) -> None:
    store = small_store(folder, capacity)
    first = seed
    while True:
        names = range(first, first + 1 + first % 7)
        outcomes = store.batch_put([key(n) for n in names], [body(n) for n in names])
        assert set(outcomes) == {Outcome.OK}, outcomes
        print(first, len(names), flush=True)
        first += len(names)


def mixed(folder: Path, capacity: int, seed: int) -> None:
    store = small_store(folder, capacity)
    random = np.random.default_rng(seed)
    right = 0
    for _ in range(150):
        names = [int(n) for n in random.integers(0, 120, 6)]
        if random.integers(0, 2):
            outcomes = store.batch_put([key(n) for n in names], [body(n) for n in names])
            # When every other process has a segment too, there may be no room for one of ours.
            assert set(outcomes) <= {Outcome.OK, Outcome.FULL}, outcomes
        else:
            buffers = [np.zeros(LENGTHS[n % len(LENGTHS)], np.uint8) for n in names]
            for n, buffer, outcome in zip(
                names, buffers, store.batch_get_into([key(n) for n in names], buffers), strict=True
            ):
                assert outcome in (Outcome.OK, Outcome.MISS), outcome
                if outcome is Outcome.OK:
                    assert np.array_equal(buffer, body(n)), f"wrong bytes for {n}"
                    right += 1
    store.close()
    assert right > 20, right
    print("done", flush=True)


def serve(folder: Path, capacity: int, seed: int) -> None:
    store = small_store(folder, capacity)
    for line in sys.stdin:
        name = int(line)
        print(name, store.batch_put([key(name)], [body(name)])[0].value, flush=True)
    store.close()


if __name__ == "__main__":
    _, folder_, capacity_, role, seed_ = sys.argv
    {"write": write, "mixed": mixed, "serve": serve}[role](Path(folder_), int(capacity_), int(seed_))
