"""Microseconds per operation of the KV bookkeeping alone (no tensors), and that no cost grows with the cache.

    python benchmarks/kv_micro.py [--quick] [--json FILE]

Geometry is Gemma 3 270M's (3 full layers, 15 SWA layers, window 511) with blocks of 16 tokens. Each line names how much
is cached, so that two sizes of the same operation can be compared.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import RequestId
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.prefix_tree import PrefixTree
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.sizing import PoolSizes
from provenance import environment

GEOMETRY = KVGeometry(GroupGeometry(3, 1, 256, 256, 2), GroupGeometry(15, 1, 256, 256, 2, 511))
BLOCK, CHUNK = 16, 1024
ROOT = root_key("bench")
SECOND = 1_000_000_000


def manager(full_blocks: int, swa_blocks: int = 20_000) -> KVManager:
    return KVManager(GEOMETRY, PoolSizes(BLOCK, full_blocks, swa_blocks, full_blocks * BLOCK), KVPolicy())


def tokens(session: int, count: int) -> list[int]:
    return [(session * 7919 + i) % 250_000 for i in range(count)]


def run(kv_manager: KVManager, session: int, prompt: list[int], *, end: bool = True) -> RequestKV:
    """Plan, admit and compute a whole request."""
    now = (session + 1) * SECOND
    kv = kv_manager.new(RequestId(f"s{session}"), ROOT, prompt)
    plan = kv_manager.plan(kv, len(prompt))
    assert kv_manager.admit(kv, plan, full_room=0, swa_room=1, now_ns=now)
    while kv.num_computed < len(prompt):
        upto = min(len(prompt), kv.num_computed + CHUNK)
        assert kv_manager.allocate(kv, upto, now)
        kv_manager.commit(kv, prompt, upto, now)
    if end:
        kv_manager.free(kv, now)
    return kv


class Bench:
    """Collects results; one line is printed per result."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, float]] = {}

    def time(self, name: str, unit: str, work: Callable[[], int]) -> None:
        """Time `work`, which returns how many units it did."""
        gc.collect()
        started = perf_counter_ns()
        units = work()
        elapsed_us = (perf_counter_ns() - started) / 1000
        self.results[name] = {"us_per_unit": elapsed_us / units, "units": units}
        print(f"{name:<58} {elapsed_us / units:10.3f} us per {unit:<8} ({units} in {elapsed_us / 1000:.1f} ms)")


def prefill(bench: Bench, sizes: list[int]) -> None:
    for size in sizes:
        prompt, kv_manager = tokens(1, size), manager(size // BLOCK + 1)

        def whole(kv_manager: KVManager = kv_manager, prompt: list[int] = prompt) -> int:
            run(kv_manager, 1, prompt)
            return len(prompt) // BLOCK

        bench.time(f"prefill in chunks of {CHUNK}, {size} tokens", "block", whole)


def decode(bench: Bench, sizes: list[int], count: int) -> None:
    for size in sizes:
        sequence, kv_manager = tokens(1, size), manager((size + count) // BLOCK + 2)
        kv = run(kv_manager, 1, sequence, end=False)

        def many(kv_manager: KVManager = kv_manager, kv: RequestKV = kv, sequence: list[int] = sequence) -> int:
            for step in range(count):
                sequence.append(step)
                assert kv_manager.allocate(kv, len(sequence), SECOND)
                kv_manager.commit(kv, sequence, len(sequence), SECOND)
            return count

        bench.time(f"decode after {size} tokens: allocate + commit", "token", many)


def match(bench: Bench, sizes: list[int], repeat: int) -> None:
    for size in sizes:
        prompt, kv_manager = tokens(1, size), manager(size // BLOCK + 1)
        run(kv_manager, 1, prompt)
        kv = kv_manager.new(RequestId("probe"), ROOT, prompt)

        def plan(kv_manager: KVManager = kv_manager, kv: RequestKV = kv, size: int = size) -> int:
            for _ in range(repeat):
                kv_manager.plan(kv, size)
            return repeat

        bench.time(f"plan, {size // BLOCK} blocks cached, last window live", "plan", plan)
        kv_manager.tree.evict_windows(kv_manager.tree.num_evictable_swa, 2 * SECOND)
        bench.time(f"plan, {size // BLOCK} blocks cached, no window live", "plan", plan)


def evict(bench: Bench, session_counts: list[int], blocks: int) -> None:
    for sessions in session_counts:
        kv_manager = manager(sessions * blocks + blocks, sessions * 80 + 200)
        for session in range(sessions):
            run(kv_manager, session, tokens(session, blocks * BLOCK))
        tree, now = kv_manager.tree, (sessions + 2) * SECOND

        def windows(tree: PrefixTree = tree, now: int = now) -> int:
            before = tree.num_checkpoints
            tree.evict_windows(tree.num_evictable_swa // 2, now)
            return before - tree.num_checkpoints

        def full(tree: PrefixTree = tree, now: int = now) -> int:
            count = tree.num_evictable_full // 2
            tree.evict_full(count, now)
            return count

        bench.time(f"evict windows, {sessions} sessions cached", "window", windows)
        bench.time(f"evict full blocks, {sessions} sessions cached", "block", full)


def churn(bench: Bench, sessions: int, blocks: int) -> None:
    """More sessions than fit: every request evicts. Fitting pools once, then twice as large, at the same pressure."""
    for scale in (1, 2):
        count = sessions * scale
        kv_manager = manager(count * blocks * 3 // 4, count * 48 + 200)
        for session in range(count):
            run(kv_manager, session, tokens(session, blocks * BLOCK))

        def round_trip(kv_manager: KVManager = kv_manager, count: int = count) -> int:
            for session in range(sessions):
                run(kv_manager, count + session, tokens(session, blocks * BLOCK))
            return sessions * blocks

        bench.time(f"churn, {count} sessions of {blocks} blocks, 3/4 fit", "block", round_trip)


def main() -> int:
    parser = argparse.ArgumentParser(description="Microseconds per operation of the KV bookkeeping.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    sizes = [10_000, 40_000] if options.quick else [10_000, 100_000, 1_000_000]
    bench = Bench()
    prefill(bench, sizes)
    decode(bench, sizes, 2_000)
    match(bench, sizes, 200)
    evict(bench, [50, 200] if options.quick else [100, 1_000], 64)
    churn(bench, 40 if options.quick else 200, 64)
    if options.json:
        report = {"config": {"quick": options.quick}, "environment": environment(), "results": bench.results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
