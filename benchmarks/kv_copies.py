"""Copies between device and host blocks on a CPU against memcpy of one large piece: GB/s, and the fraction.

    python benchmarks/kv_copies.py [--json FILE] [--rounds N] [--mib N]

memcpy and the copies take turns, so that whatever else uses the memory hurts both; `of memcpy` is the median over
rounds of (time of memcpy / time of the copies of as many bytes). Blocks have 16 tokens in bf16. `runs` are blocks that
follow each other in both tiers, `scattered` ones follow each other in none.
"""

import argparse
import ctypes
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import numpy as np
import torch

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockId
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.runtime.transfers import TransferEngine
from cygnet.kv.sizing import PoolSizes
from cygnet.kv.store import Group
from cygnet.kv.transfers import Copies, StepTransfers
from cygnet.model.batch import GroupName
from provenance import environment

BLOCK_SIZE = 16
GEOMETRIES = {
    "Gemma 3 270M": KVGeometry(GroupGeometry(3, 1, 256, 256, 2), GroupGeometry(15, 1, 256, 256, 2, 511)),
    "MiMo-V2.5": KVGeometry(GroupGeometry(9, 4, 192, 128, 2), GroupGeometry(39, 8, 192, 128, 2, 128)),
}


@dataclass
class Row:
    """Copies of one kind."""

    model: str
    group: str
    blocks: str
    direction: str
    gb_per_s: float
    of_memcpy: float


def seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def run(engine: TransferEngine, step: StepTransfers) -> None:
    engine.begin(step).join()


def measure(model: str, group: Group, num_bytes: int, rounds: int) -> list[Row]:
    """One group of one model, in pools of `num_bytes`."""
    geometry = GEOMETRIES[model]
    shape = geometry.full if group is Group.FULL else geometry.swa
    count = num_bytes // shape.block_bytes(BLOCK_SIZE)
    full, swa = (count if group is one else 1 for one in Group)
    device = DevicePool(geometry, PoolSizes(BLOCK_SIZE, full, swa, 1 << 20), dtype=torch.bfloat16, device="cpu")
    host = HostPool(geometry, full, swa, BLOCK_SIZE, torch.bfloat16)
    layers = device.full if group is Group.FULL else device.swa
    for layer in layers:
        layer.key.fill_(1)
        layer.value.fill_(1)
    for block in range(count):
        host.object(group, block)[:] = bytes(host.object_bytes[group])
    total = count * shape.block_bytes(BLOCK_SIZE)
    here, there = (np.frombuffer(pool_memory(total), np.uint8) for _ in range(2))
    here[:], there[:] = 1, 2
    name: GroupName = "full" if group is Group.FULL else "swa"
    engine = TransferEngine(device, host, [(name, index) for index in range(len(layers))])
    rows = []
    for blocks in ("runs", "scattered"):
        left, right = list(range(count)), list(range(count))
        if blocks == "scattered":
            Random(0).shuffle(left)
            Random(1).shuffle(right)
        pairs = tuple((BlockId(a), BlockId(b)) for a, b in zip(left, right, strict=True))
        copies = Copies(full=pairs) if name == "full" else Copies(swa=pairs)
        for direction in ("loads", "saves"):
            step = StepTransfers(loads=copies) if direction == "loads" else StepTransfers(saves=copies)
            times = [
                (
                    seconds(lambda: ctypes.memmove(here.ctypes.data, there.ctypes.data, total)),
                    seconds(partial(run, engine, step)),
                )
                for _ in range(rounds + 1)
            ][1:]
            speed = total / median(time for _, time in times) / 1e9
            rows.append(Row(model, name, blocks, direction, speed, median(plain / time for plain, time in times)))
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="bytes copied at a time, in MiB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'model':14} {'group':5} {'blocks':9} {'direction':9} {'GB/s':>5} {'of memcpy':>9}")
    for model in GEOMETRIES:
        for group in Group:
            for row in measure(model, group, args.mib << 20, args.rounds):
                rows.append(row)
                print(
                    f"{row.model:14} {row.group:5} {row.blocks:9} {row.direction:9} "
                    f"{row.gb_per_s:5.1f} {row.of_memcpy:9.2f}"
                )
    if args.json:
        report = {"environment": environment(mib=args.mib, rounds=args.rounds), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
