"""What an engine tells of its cache, put together again, is what its trees hold; after any load, gaps or overflow."""

from random import Random

import pytest

from cygnet.base.geometry import KVGeometry
from cygnet.base.messages import CacheChanged
from cygnet.kv.hashing import extend_keys, root_key
from cygnet.kv.journal import Journal
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.residency import ResidencyView
from cygnet.kv.sizing import min_swa_blocks

from .test_core import FULL_ONLY, HYBRID, SIZE, Bench, prompt_of
from .test_tiers import TierBench

LONGEST = 60
ROOT = root_key("fake")


def held(kv: KVManager) -> list[dict[bytes, tuple[int, bool]]]:
    """What the trees hold, in a view's words."""
    trees = [kv.tree] if kv.host is None else [kv.tree, kv.host.tree]
    by_tier = [{n.key: (n.index, n.swa_block >= 0) for n in tree.nodes()} for tree in trees]
    return by_tier + [{}] * (2 - len(by_tier))


def compare(view: ResidencyView, kv: KVManager, prompts: list[list[int]]) -> None:
    """View and trees agree, and so do their answers for whole prompts and parts of them."""
    assert view.contents() == held(kv)
    for prompt in prompts:
        request = RequestKV(f"probe {len(prompt)}", ROOT)  # type: ignore[arg-type]
        extend_keys(request.keys, ROOT, prompt, SIZE, len(prompt))
        assert view.effective(request.keys, len(prompt)) == kv.plan(request, len(prompt)).start


def view_of(kv: KVManager) -> ResidencyView:
    return ResidencyView(kv.geometry, SIZE, rebuild=kv.policy.rebuild)


@pytest.mark.parametrize("rebuild", [True, False])
@pytest.mark.parametrize("geometry", [HYBRID, FULL_ONLY], ids=["hybrid", "full-only"])
@pytest.mark.parametrize("host", [(40, 24), None], ids=["host", "device"])
def test_what_is_told_is_what_is_there(geometry: KVGeometry, host: tuple[int, int] | None, rebuild: bool) -> None:
    random = Random(f"{geometry.has_swa} {host} {rebuild}")
    bench = TierBench(
        geometry,
        full_blocks=LONGEST // SIZE + 8,
        swa_blocks=min_swa_blocks(geometry, SIZE, 16) + 6,
        host=host,
        store=False,
        max_model_len=LONGEST + 20,
        kv_policy=KVPolicy(rebuild=rebuild, track_freed=True),
    )
    kv, view = bench.kv, view_of(bench.kv)
    prompts = [prompt_of(random, LONGEST) for _ in range(10)]
    for turn in range(40):
        if turn == 3:
            kv.journal.switch(True)  # not from the start
            assert view.apply(kv.journal.whole())
        base = random.choice(prompts)
        prompts[random.randrange(10)] = (base[: random.randint(1, len(base))] + prompt_of(random, 20))[:LONGEST]
        bench.add(f"r{turn}", random.choice(prompts), max_tokens=random.randint(1, 12))
        while bench.step():
            told = kv.journal.take()
            if told is not None:
                assert view.apply(told)
            if kv.journal.on and random.random() < 0.3:
                if told is None:
                    assert (last := kv.journal.take()) is None or view.apply(last)
                compare(view, kv, prompts)
        if turn % 13 == 12:
            bench.core.flush_cache()
    assert kv.tree.evicted_full_blocks_total > 0
    last = kv.journal.take()
    assert last is None or view.apply(last)
    compare(view, kv, prompts)
    assert len(view) > 0


def test_prompts_are_told_with_their_last_whole_block() -> None:
    bench = Bench()
    bench.kv.journal.switch(True)
    view = view_of(bench.kv)
    view.apply(bench.kv.journal.whole())
    bench.add("a", [5] * 18, max_tokens=1)
    bench.run()
    told = bench.kv.journal.take()
    assert told is not None
    assert view.apply(told)
    ((name, num_tokens, key),) = told.prompts
    block = view.find(key)
    assert block is not None
    assert (name, num_tokens, block.index) == ("a", 18, 18 // SIZE - 1)


def test_too_many_changes_become_a_whole() -> None:
    bench = Bench()
    journal = bench.kv.journal = Journal([bench.kv.tree], limit=5)
    journal.switch(True)
    view = view_of(bench.kv)
    view.apply(journal.whole())
    bench.add("a", [5] * 40, max_tokens=2)
    bench.run()
    told = journal.take()
    assert told is not None
    assert told.whole
    assert view.apply(told)
    compare(view, bench.kv, [[5] * 50])


def test_nothing_is_recorded_when_nobody_follows() -> None:
    bench = Bench()
    bench.add("a", [5] * 40, max_tokens=2)
    bench.run()
    assert bench.kv.journal.take() is None
    bench.kv.journal.switch(True)
    bench.add("b", [6] * 40, max_tokens=2)
    bench.run()
    bench.kv.journal.switch(False)
    assert bench.kv.journal.take() is None
    assert bench.kv.tree.on_change is None


@pytest.mark.parametrize(
    "told",
    [
        CacheChanged(3, False, [], []),  # a gap
        CacheChanged(2, False, [(1, b"unknown", b"")], []),
        CacheChanged(2, False, [(0, b"child", b"unknown")], []),
        CacheChanged(2, False, [(99, b"a", b"")], []),
    ],
)
def test_what_does_not_fit_makes_a_view_void(told: CacheChanged) -> None:
    view = ResidencyView(HYBRID, SIZE, rebuild=True)
    assert not view.apply(CacheChanged(1, False, [], []))  # no whole yet
    assert view.apply(CacheChanged(1, True, [(0, b"a", b""), (2, b"a", b"")], []))
    assert view.effective([b"a"], 9) == SIZE
    assert not view.apply(told)
    assert not view.valid
    assert view.effective([b"a"], 9) == 0
    assert view.apply(CacheChanged(7, True, [(0, b"a", b"")], []))
    assert view.valid
