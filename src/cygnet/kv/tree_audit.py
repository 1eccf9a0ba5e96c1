"""The prefix tree's invariants, recomputed from its nodes alone."""

from collections import Counter
from typing import TYPE_CHECKING

from cygnet.base.ids import NO_BLOCK, BlockKey
from cygnet.kv.node import Node

if TYPE_CHECKING:
    from cygnet.kv.prefix_tree import PrefixTree


class TreeAudit:
    """One look at a tree. Reads its private state and changes nothing."""

    def __init__(self, tree: "PrefixTree") -> None:
        self._tree = tree
        self._nodes = tree._nodes
        self._children: Counter[int] = Counter()
        self._marks: Counter[int] = Counter()
        self._live_above: dict[int, int] = {}
        """By node: index of the nearest node above it with SWA KV, or -1."""
        for node in self._nodes.values():
            self._live_above[id(node)] = -1
            if (parent := node.parent) is not None:
                self._children[id(parent)] += 1
                dead = parent.swa_block == NO_BLOCK
                self._live_above[id(node)] = self._live_above.get(id(parent), -1) if dead else parent.index
            if node.checkpoint is not None:
                self._marks.update(id(member) for member in node.path_up(tree.window_blocks))

    def faults(self) -> list[str]:
        """All discrepancies."""
        faults = [
            f"node {node.index} ({key.hex()[:8]}) {fault}"
            for key, node in self._nodes.items()
            for good, fault in (*self._check_node(key, node), *self._check_swa(node))
            if not good
        ]
        for group, blocks in (
            ("full", [node.full_block for node in self._nodes.values()]),
            ("SWA", [node.swa_block for node in self._nodes.values() if node.swa_block != NO_BLOCK]),
        ):
            faults += [f"{group} block {b} is held {n} times" for b, n in Counter(blocks).items() if n > 1]
        faults += self._tree._leaf_uses.audit() + self._tree._window_uses.audit()
        return faults + self._check_counters()

    def _check_node(self, key: BlockKey, node: Node) -> tuple[tuple[bool, str], ...]:
        tree, parent, children = self._tree, node.parent, self._children[id(node)]
        return (
            (node.key == key, "is filed under another key"),
            (parent is None or self._nodes.get(parent.key) is parent, "has a parent outside the tree"),
            (node.index == (parent.index + 1 if parent else 0), "has a wrong index"),
            (parent is None or parent.locks >= node.locks, "is locked more often than its parent"),
            (node.num_children == children, f"counts {node.num_children} children, has {children}"),
            (not tree._full_pool.is_free(node.full_block), f"holds free full block {node.full_block}"),
            ((node in tree._leaves) == (node.locks == 0 and children == 0), "is wrongly in or out of the leaf set"),
        )

    def _check_swa(self, node: Node) -> tuple[tuple[bool, str], ...]:
        tree, live, marks = self._tree, node.swa_block != NO_BLOCK, self._marks[id(node)]
        skipped_to = node.skip.index if node.skip else -1
        return (
            (node.swa_marks == marks, f"counts {node.swa_marks} covering checkpoints, has {marks}"),
            (not live or not tree._swa_pool.is_free(node.swa_block), f"holds free SWA block {node.swa_block}"),
            (live == (node.swa_locks + node.swa_marks > 0), "keeps SWA without reason or vice versa"),
            (node.swa_locks == 0 or node.locks > 0, "has its SWA locked but not itself"),
            (node.checkpoint is None or node.checkpoint in tree._checkpoints, "has an unlisted checkpoint"),
            (
                live or node.skip_epoch != tree._skip_epoch or skipped_to >= self._live_above[id(node)],
                "skips over live SWA",
            ),
        )

    def _check_counters(self) -> list[str]:
        tree, nodes = self._tree, self._nodes.values()
        swa = [node for node in nodes if node.swa_block != NO_BLOCK]
        checks = (
            ("evictable full blocks", tree.num_evictable_full, sum(1 for n in nodes if n.locks == 0)),
            ("evictable SWA blocks", tree.num_evictable_swa, sum(1 for n in swa if n.swa_locks == 0)),
            ("SWA blocks", tree.num_swa_blocks, len(swa)),
            ("checkpoints", tree.num_checkpoints, sum(1 for n in nodes if n.checkpoint is not None)),
            ("leaves", len(tree._leaves), sum(1 for n in nodes if n.locks == 0 and not self._children[id(n)])),
        )
        faults = [f"tree counts {counted} {what}, has {real}" for what, counted, real in checks if counted != real]
        return faults + tree._leaves.audit() + tree._checkpoints.audit()
