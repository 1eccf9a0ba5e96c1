"""What the running requests hold against pools and tree, recomputed from scratch."""

from collections import Counter
from collections.abc import Sequence

from cygnet.base.ids import NO_BLOCK, BlockId
from cygnet.kv.block_pool import BlockPool
from cygnet.kv.prefix_tree import PrefixTree
from cygnet.kv.request_kv import RequestKV


def audit_requests(
    full_pool: BlockPool, swa_pool: BlockPool, tree: PrefixTree, requests: Sequence[RequestKV]
) -> list[str]:
    """All discrepancies between the pools, the tree over them and the KV of all running requests."""
    faults = full_pool.audit() + swa_pool.audit() + tree.audit()
    full = [node.full_block for node in tree.nodes()]
    swa = [node.swa_block for node in tree.nodes() if node.swa_block != NO_BLOCK]
    for kv in requests:
        full += kv.owned_full()
        swa += kv.owned_swa()
        faults += kv.audit()
    return faults + _check_owners(full_pool, full) + _check_owners(swa_pool, swa) + _check_locks(tree, requests)


def _check_owners(pool: BlockPool, owned: list[BlockId]) -> list[str]:
    faults = [f"{pool.name} pool: owned block {block} is free" for block in owned if pool.is_free(block)]
    if len(set(owned)) != len(owned):
        faults.append(f"{pool.name} pool: a block has two owners")
    if len(owned) + pool.num_free != pool.num_blocks:
        faults.append(f"{pool.name} pool: {len(owned)} owned + {pool.num_free} free != {pool.num_blocks}")
    return faults


def _check_locks(tree: PrefixTree, requests: Sequence[RequestKV]) -> list[str]:
    locks = Counter(id(node) for kv in requests for node in kv.nodes)
    swa_locks = Counter(id(kv.nodes[index]) for kv in requests for index in kv.shared_swa())
    faults = []
    for node in tree.nodes():
        if node.locks != locks[id(node)]:
            faults.append(f"node {node.index}: {node.locks} locks, {locks[id(node)]} requests hold it")
        if node.swa_locks != swa_locks[id(node)]:
            faults.append(f"node {node.index}: {node.swa_locks} SWA locks, {swa_locks[id(node)]} holders")
    return faults
