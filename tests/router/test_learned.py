"""Text laid over tokens: what is learned of one prompt answers for others that begin like it."""

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import CacheChanged
from cygnet.base.residency import ADDED, REMOVED, WINDOW_GONE, WINDOW_LIVE
from cygnet.kv.hashing import extend_keys, root_key
from cygnet.kv.residency import ResidencyView
from cygnet.router.learned import NOTHING_KNOWN, LearnedPrefixes
from router.chains import chain_of

FULL = GroupGeometry(2, 1, 4, 4, 2)
PLAIN = KVGeometry(FULL, GroupGeometry(0, 0, 0, 0, 2))
SLIDING = KVGeometry(FULL, GroupGeometry(3, 1, 4, 4, 2, window=8))
SIZE = 4
TOKENS_PER_WORD = 8
"""Of a block of text, which is a word here: two blocks of the worker's."""


def keys_of(words: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    tokens = [word * TOKENS_PER_WORD + i for word in words for i in range(TOKENS_PER_WORD)]
    extend_keys(keys, root_key("x"), tokens, SIZE, len(tokens))  # type: ignore[arg-type]
    return keys


class Worker:
    """A view, fed by hand."""

    def __init__(self, geometry: KVGeometry = PLAIN) -> None:
        self.view = ResidencyView(geometry, SIZE)
        self.view.apply(CacheChanged(0, True, [], []))

    def tell(self, *changes: tuple[int, bytes, bytes]) -> None:
        assert self.view.apply(CacheChanged(self.view.sequence + 1, False, list(changes), []))

    def compute(self, words: list[int], learned: LearnedPrefixes, *, windows: bool = True) -> None:
        """A prompt is computed here, and learned from."""
        keys = keys_of(words)
        for place, key in enumerate(keys):
            if self.view.find(key) is None:
                self.tell((ADDED, key, keys[place - 1] if place else b""))
                if windows:
                    self.tell((WINDOW_LIVE, key, b""))
        tip = self.view.find(keys[-1])
        assert tip is not None
        learned.learn(chain_of(words), len(words), tip, len(words) * TOKENS_PER_WORD, SIZE)

    def evict(self, words: list[int], keep: int) -> None:
        """All but the first `keep` words' blocks go."""
        for key in reversed(keys_of(words)[keep * TOKENS_PER_WORD // SIZE :]):
            self.tell((WINDOW_GONE, key, b""), (REMOVED, key, b""))

    def spares(self, words: list[int], learned: LearnedPrefixes) -> tuple[int, float]:
        """Words of a prompt that are there, and the part of them that need not be computed."""
        known = learned.find(chain_of(words))
        count, part = self.view.reusable(known.keys)
        return (known.depths[count - 1] if count else 0), part


def test_what_one_has_learned_another_can_note() -> None:
    worker, ours, theirs = Worker(), LearnedPrefixes(1000), LearnedPrefixes(1000)
    words = list(range(1, 50))
    worker.compute(words, ours)
    tip = worker.view.find(keys_of(words)[-1])
    assert tip is not None
    fresh = LearnedPrefixes(1000)
    first = fresh.learn(chain_of(words), len(words), tip, len(words) * TOKENS_PER_WORD, SIZE)
    theirs.note(first)
    assert theirs.find(chain_of(words)) == ours.find(chain_of(words)) != NOTHING_KNOWN
    assert fresh.learn(chain_of(words), len(words), tip, len(words) * TOKENS_PER_WORD, SIZE) == {}
    longer = [*words, 77, 78]
    worker.compute(longer, ours)
    tip = worker.view.find(keys_of(longer)[-1])
    assert tip is not None
    grown = fresh.learn(chain_of(longer), len(longer), tip, len(longer) * TOKENS_PER_WORD, SIZE)
    assert 0 < len(grown) < len(first)
    theirs.note(grown)
    assert theirs.find(chain_of(longer)) == ours.find(chain_of(longer))
    late = LearnedPrefixes(1000)
    late.note(grown)
    assert late.find(chain_of(longer)) == NOTHING_KNOWN
    late.learn(chain_of(longer), len(longer), tip, len(longer) * TOKENS_PER_WORD, SIZE)
    assert late.find(chain_of(longer)) == ours.find(chain_of(longer))


def test_a_prompt_that_goes_on_is_found_and_one_that_begins_otherwise_is_not() -> None:
    learned, worker = LearnedPrefixes(10_000), Worker()
    words = list(range(100))
    worker.compute(words, learned)
    assert worker.spares([*words, 7, 8, 9], learned) == (100, 1.0)
    assert worker.spares([*words[:20], 500, 501], learned) == (20, 1.0)
    assert learned.find(chain_of([900, *words])) == NOTHING_KNOWN
    assert Worker().spares(words, learned) == (0, 0.0)


def test_what_is_evicted_is_no_longer_found() -> None:
    learned, worker = LearnedPrefixes(10_000), Worker()
    words = list(range(100))
    worker.compute(words, learned)
    worker.evict(words, 30)
    assert worker.spares(words, learned) == (30, 1.0)
    worker.evict(words[:30], 0)
    assert worker.spares(words, learned) == (0, 0.0)


def test_a_lost_window_leaves_what_a_rebuild_leaves() -> None:
    """Two words are replayed per SWA layer and window; a window that is nearer spares that."""
    learned, worker = LearnedPrefixes(10_000), Worker(SLIDING)
    words = list(range(50))
    worker.compute(words, learned)
    assert worker.spares(words, learned) == (50, 1.0)
    worker.tell(*((WINDOW_GONE, key, b"") for key in keys_of(words)))
    depth, part = worker.spares(words, learned)
    assert depth == 50
    assert part == (50 * TOKENS_PER_WORD - SLIDING.rebuild_tokens) / (50 * TOKENS_PER_WORD)
    worker.tell(*((WINDOW_LIVE, key, b"") for key in keys_of(words)[94:98]))
    assert worker.spares(words, learned) == (50, 98 / 100)


def test_where_two_prompts_part_each_goes_its_way() -> None:
    learned = LearnedPrefixes(10_000)
    first, second = Worker(), Worker()
    ours, theirs = [*range(40), *range(100, 140)], [*range(40), *range(200, 240)]
    first.compute(ours, learned)
    second.compute(theirs, learned)
    assert first.spares(ours, learned) == (80, 1.0)
    assert second.spares(ours, learned) == (40, 1.0)
    assert first.spares(theirs, learned) == (40, 1.0)


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    learned, worker = LearnedPrefixes(200), Worker()
    kept = list(range(20))
    for turn in range(60):
        worker.compute([1000 + turn * 50 + i for i in range(20)], learned)
        worker.compute([*kept, 5000 + turn], learned)
        assert len(learned) <= 200
    assert worker.spares(kept, learned) == (20, 1.0)
    assert learned.find(chain_of([1000 + i for i in range(20)])) == NOTHING_KNOWN
