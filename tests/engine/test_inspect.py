"""The report of what is cached where, over a core with three tiers: pools, sequences, branches, windows, bounds."""

from random import Random

import msgspec
import pytest

from cygnet.base.cache_report import CacheReport, SequenceReport
from cygnet.base.ids import BlockKey
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.kv import inspect
from cygnet.kv.node import Node
from cygnet.kv.policy import TierPolicy

from .test_core import FULL_ONLY, HYBRID, SIZE, WINDOW, prompt_of
from .test_tiers import MS, TierBench

PROMPT = [1 + i % 9 for i in range(62)]
"""15 whole blocks; with the answer's tokens a 16th."""


def report(bench: TierBench, limit: int = 100) -> CacheReport:
    return bench.core.inspect_cache(limit, bench.now)


def only(bench: TierBench) -> SequenceReport:
    (sequence,) = report(bench).sequences
    return sequence


def key_of(bench: TierBench, tokens: list[int]) -> str:
    """How the report names the sequence of whole blocks in `tokens`."""
    keys = bench.core.prepare(AddRequest("probe", tokens, SamplingParams())).kv.keys
    return keys[len(tokens) // SIZE - 1].hex()[: inspect.KEY_DIGITS]


def test_an_empty_cache() -> None:
    seen = report(TierBench())
    assert (seen.num_sequences, seen.sequences) == (0, ())
    assert (seen.block_size, seen.window, seen.tiers) == (SIZE, WINDOW, ("device", "host", "store"))
    assert [(p.tier, p.group, p.num_blocks, p.free) for p in seen.pools] == [
        ("device", "full", 30, 30),
        ("device", "swa", 14, 14),
        ("host", "full", 200, 200),
        ("host", "swa", 60, 60),
    ]
    assert report(TierBench(host=None)).tiers == ("device",)
    assert [(p.tier, p.group) for p in report(TierBench(FULL_ONLY, store=False)).pools] == [
        ("device", "full"),
        ("host", "full"),
    ]


def test_one_sequence_on_all_tiers() -> None:
    bench = TierBench()
    bench.ask("one", PROMPT, max_tokens=4)
    bench.now += 5000 * MS
    seen = only(bench)
    assert seen.key == key_of(bench, PROMPT + bench.tokens["one"][:2])
    assert seen.prefix == key_of(bench, PROMPT[:SIZE])
    assert seen.num_tokens == seen.device_tokens == seen.host_tokens == seen.store_tokens == 64
    assert (seen.shared_tokens, seen.reuses, seen.num_running) == (0, 0, 0)
    assert seen.age_s == pytest.approx(5, abs=0.5)
    assert [w.end for w in seen.windows] == sorted(w.end for w in seen.windows)
    assert {60, 64} <= {w.end for w in seen.windows}, "end of prompt and of response"
    assert all(w.tiers == ("device", "host", "store") for w in seen.windows)
    bench.ask("again", PROMPT)
    assert only(bench).reuses == 1


def test_what_the_device_has_lost_is_still_told_of() -> None:
    bench = TierBench(store=False)
    bench.ask("one", PROMPT)
    bench.kv.tree.flush()
    seen = only(bench)
    assert (seen.num_tokens, seen.device_tokens, seen.host_tokens, seen.store_tokens) == (64, 0, 64, 0)
    assert {w.tiers for w in seen.windows} == {("host",)}
    bench.ask("two", [*PROMPT[:40], 9, 9])  # brings the first 10 blocks back to the device
    first = next(s for s in report(bench).sequences if s.num_tokens == 64)
    assert (first.device_tokens, first.host_tokens, first.shared_tokens) == (40, 64, 40)
    bench.kv.host.flush()
    assert {s.host_tokens for s in report(bench).sequences} == {0}


def test_sequences_that_part() -> None:
    bench = TierBench(full_blocks=60)
    bench.ask("one", PROMPT)
    bench.ask("two", [*PROMPT[:32], *[7] * 30])
    seen = report(bench).sequences
    assert [s.shared_tokens for s in seen] == [32, 32]
    assert len({s.prefix for s in seen}) == 1
    assert [s.reuses for s in seen] == [0, 0], "the second request reused what both share"


def test_sequences_that_part_with_one_branch_in_each_tier() -> None:
    """No node of either tree has two children."""
    bench = TierBench(full_blocks=60, store=False, policy=TierPolicy(write="selective"))
    bench.ask("one", PROMPT)
    bench.ask("again", PROMPT)
    bench.kv.tree.flush()
    bench.ask("two", [*PROMPT[:32], *[7] * 30])
    assert all(node.num_children < 2 for tree in (bench.kv.tree, bench.kv.host.tree) for node in tree.nodes())
    two, one = report(bench).sequences
    assert (one.num_tokens, one.device_tokens, one.host_tokens, one.shared_tokens) == (60, 32, 60, 32)
    assert (two.num_tokens, two.device_tokens, two.host_tokens, two.shared_tokens) == (64, 64, 32, 32)


def test_tenants_have_prefixes_of_their_own() -> None:
    bench = TierBench(full_blocks=60)
    bench.ask("one", PROMPT)
    bench.core.add(AddRequest("two", PROMPT, SamplingParams(max_tokens=2), cache_salt="other"), bench.now)
    bench.tokens["two"] = []
    bench.run()
    assert len({s.prefix for s in report(bench).sequences}) == 2


def test_a_running_request_is_counted_with_its_sequence() -> None:
    bench = TierBench(full_blocks=60)
    bench.ask("done", PROMPT)
    bench.add("runs", [*PROMPT[:32], *[7] * 28], max_tokens=20)
    for _ in range(5):
        bench.step()
    running = {s.key: s.num_running for s in report(bench).sequences}
    assert sorted(running.values()) == [0, 1]
    assert running[key_of(bench, PROMPT + bench.tokens["done"][:2])] == 0
    bench.run()
    assert [s.num_running for s in report(bench).sequences] == [0, 0]


def test_the_latest_come_first_and_only_so_many() -> None:
    bench = TierBench(full_blocks=100, max_model_len=100)
    for value in (3, 4, 5):
        bench.ask(f"ask {value}", [value] * 50)
        bench.now += 1000 * MS
    seen = report(bench, limit=2)
    assert seen.num_sequences == 3
    assert [s.prefix for s in seen.sequences] == [key_of(bench, [value] * SIZE) for value in (5, 4)]
    assert report(bench).sequences[:2] == seen.sequences


def test_long_sequences_are_not_walked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once enough blocks were looked at, no further sequence is begun; shared blocks are looked at once."""
    bench = TierBench(full_blocks=100, max_model_len=100)
    for value in (3, 4, 5):
        bench.ask(f"ask {value}", [*PROMPT[:40], *[value] * 20])
    walk = inspect._Walk(bench.kv.tree, bench.kv.host.tree, SIZE, bench.now)
    for tip in inspect._tips(bench.kv):
        walk.describe(tip)
    assert walk.num_nodes == len(bench.kv.host.tree) == 10 + 3 * 5
    monkeypatch.setattr(inspect, "MOST_NODES", 18)
    seen = report(bench)
    assert (len(seen.sequences), seen.num_sequences) == (2, 3)


Row = tuple[str, int, int, int, int, list[tuple[int, tuple[str, ...]]]]


def row_of(s: SequenceReport) -> Row:
    windows = [(window.end, window.tiers) for window in s.windows]
    return s.key, s.num_tokens, s.device_tokens, s.host_tokens, s.shared_tokens, windows


def expected_sequences(bench: TierBench) -> list[Row]:
    """The same report, put together in the plainest way from all nodes of both trees."""
    trees = {"device": bench.kv.tree, "host": bench.kv.host.tree}
    nodes: dict[BlockKey, Node] = {}
    children: dict[BlockKey, set[BlockKey]] = {}
    for tree in trees.values():
        for node in tree.nodes():
            nodes[node.key] = node
            if node.parent is not None:
                children.setdefault(node.parent.key, set()).add(node.key)
    rows = []
    for tip in nodes.values():
        if tip.key in children:
            continue
        path = list(tip.path_up(tip.index + 1))[::-1]
        counts = [sum(tree.get(node.key) is not None for node in path) * SIZE for tree in trees.values()]
        shared = max((i + 1 for i, node in enumerate(path) if len(children.get(node.key, ())) > 1), default=0)
        windows = []
        for node in path:
            found = {name: tree.get(node.key) for name, tree in trees.items()}
            tiers = tuple(name for name, at in found.items() if at is not None and at.checkpoint is not None)
            if tiers:
                windows.append(((node.index + 1) * SIZE, tiers))
        rows.append((tip.key.hex()[: inspect.KEY_DIGITS], len(path) * SIZE, *counts, shared * SIZE, windows))
    return sorted(rows)


@pytest.mark.parametrize("seed", range(12))
def test_it_says_what_a_plain_count_says(seed: int) -> None:
    """Under any load, at any moment, with evictions in both tiers."""
    rnd = Random(seed)
    bench = TierBench(HYBRID, full_blocks=26, host=(40, 20), max_model_len=80, store=False, seed=seed)
    for index in range(20):
        bench.add(f"r{index}", prompt_of(rnd, 70), rnd.randint(1, 8))
        for _ in range(rnd.randint(0, 6)):
            bench.step()
        seen = report(bench)
        assert seen.num_sequences == len(seen.sequences)
        rows = [
            (
                s.key,
                s.num_tokens,
                s.device_tokens,
                s.host_tokens,
                s.shared_tokens,
                [(w.end, w.tiers) for w in s.windows],
            )
            for s in seen.sequences
        ]
        assert sorted(rows) == expected_sequences(bench)
        for pool in seen.pools:
            assert pool.used + pool.cached + pool.free == pool.num_blocks
    bench.run()


def test_it_holds_no_tokens() -> None:
    """Whatever is in the report is a number, a tier, a group, or the beginning of a hash."""
    bench = TierBench()
    bench.ask("one", PROMPT)
    sequence = msgspec.to_builtins(only(bench))
    words = {name: value for name, value in sequence.items() if not isinstance(value, int | float)}
    assert set(words) == {"key", "prefix", "windows"}
    assert all(len(words[name]) == inspect.KEY_DIGITS for name in ("key", "prefix"))


def test_a_flush_says_what_it_dropped() -> None:
    bench = TierBench(full_blocks=60)
    bench.ask("one", PROMPT)
    windows, host_windows = bench.kv.tree.num_checkpoints, bench.kv.host.tree.num_checkpoints
    bench.add("runs", [7] * 40, max_tokens=20)
    for _ in range(5):
        bench.step()
    dropped = bench.core.flush_cache()
    assert (dropped.device_blocks, dropped.host_blocks) == (16, 16)
    assert dropped.device_windows >= windows > 0
    assert dropped.host_windows >= host_windows > 0
    assert dropped.kept_blocks >= 10
    assert not dropped.store
    bench.run()
    assert bench.core.flush_cache(store=True).store
    assert not TierBench(store=False).core.flush_cache(store=True).store


def test_statistics_of_the_tiers() -> None:
    bench = TierBench()
    bench.ask("cold", PROMPT)
    bench.start()
    assert bench.ask("restarted", PROMPT) == (0, 0, 60)
    bench.crowd_out()
    device, host, _ = bench.ask("warm", PROMPT)
    stats = bench.core.stats()
    assert stats.host_full.num_blocks == 200
    assert stats.host_full.used == 0 < stats.host_full.cached
    assert stats.store_hit_tokens_total == 60
    assert stats.host_hit_tokens_total == host > 0
    assert stats.effective_hit_tokens_total == 60 + device + host
    fetched = 15 + -(-WINDOW // SIZE)
    assert stats.store_fetched_objects_total == fetched <= stats.store_found_objects_total
    assert stats.loaded_full_blocks_total == 15 + host // SIZE
    assert stats.loaded_swa_blocks_total > 0
    assert stats.saved_full_blocks_total > 0 < stats.saved_swa_blocks_total
    assert stats.store_stored_objects_total == bench.kv.store.writes.stored_objects_total > 0
    assert stats.store_waiting_fetches == stats.store_waiting_puts == stats.store_queued_writes == 0
    assert (stats.host_tree_blocks, stats.host_tree_windows) == (
        len(bench.kv.host.tree),
        bench.kv.host.tree.num_checkpoints,
    )
