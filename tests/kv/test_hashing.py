"""Chained block keys: equal exactly when everything up to the block's end is."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.ids import BlockKey
from cygnet.kv.hashing import KEY_BYTES, common_blocks, extend_keys, root_key

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def keys_of(tokens: list[int], block_size: int = 4, root: BlockKey | None = None) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_keys(keys, root or root_key("model"), tokens, block_size, len(tokens))
    return keys


def test_root_depends_on_model_and_salt_and_on_where_one_ends() -> None:
    roots = {root_key("m"), root_key("m", "a"), root_key("m", "b"), root_key("ma"), root_key("", "ma"), root_key("")}
    assert len(roots) == 6
    assert all(len(root) == KEY_BYTES for root in roots)


def test_tenants_share_no_key() -> None:
    tokens = list(range(40))
    assert not set(keys_of(tokens, root=root_key("m", "a"))) & set(keys_of(tokens, root=root_key("m", "b")))


def test_a_key_names_the_whole_prefix() -> None:
    """All sequences of three blocks over two letters: as many keys as there are distinct prefixes."""
    keys = {key for tokens in product(range(2), repeat=6) for key in keys_of(list(tokens), 2)}
    assert len(keys) == 4 + 16 + 64


def test_the_same_tokens_cut_otherwise_have_other_keys() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 4]
    assert not set(keys_of(tokens, 2)) & set(keys_of(tokens, 4))
    first, second = keys_of(tokens, 4)
    assert first != second, "the same block of tokens at another place is another block"


def test_large_token_ids_are_not_truncated() -> None:
    assert keys_of([1, 2, 3, 2**31 - 1]) != keys_of([1, 2, 3, 2**31 - 2]) != keys_of([1, 2, 3, 2**16 - 2])


@given(TOKENS, st.lists(st.integers(0, 24), max_size=4))
def test_extending_piece_by_piece_equals_all_at_once(tokens: list[int], cuts: list[int]) -> None:
    keys: list[BlockKey] = []
    for cut in [*cuts, len(tokens)]:
        extend_keys(keys, root_key("model"), tokens, 4, min(cut, len(tokens)))
    assert keys == keys_of(tokens)
    assert len(keys) == len(tokens) // 4


@given(TOKENS, TOKENS)
def test_common_blocks_counts_the_shared_whole_blocks(a: list[int], b: list[int]) -> None:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    assert common_blocks(keys_of(a), keys_of(b)) == shared // 4
