"""A request that shares the beginning of a conversation and goes another way: Cygnet beside vLLM and llama.cpp.

    python benchmarks/branches.py [--quick] [--engines NAME ...] [--rows TEXT ...] [--rounds N] [--threads N]
                                  [--json FILE] [--check]
    python benchmarks/branches.py --retention      what each retention rule saves and weighs; no model, a few seconds

A conversation is prefilled turn by turn, then a request comes that shares its first tokens and has 200 others behind
them; the time to its first token is measured. Engines take turns as in `engine.py`, with the same prompts, and a new
conversation in every round. The sliding windows within a conversation are what an engine keeps or loses:

    edit of an earlier turn     the first 6,144 tokens of it came at once (after a restart, from another replica), then
                                one more turn; the edited one is among the first
    other user, same prompt     it came as one request; 4,096 tokens of it are the system prompt
    sub-agent                   tools and system prompt are the first 4,096 tokens; then turns of 1,024
    ... of 3,000 tokens         as the second, but not at a power of two; no target: what lies between retained windows
    edit, turn by turn          it came in turns of 1,024 tokens and is left at the end of the fourth; no target, as any
                                engine with room keeps the windows at the ends of its requests
    16K, windows evicted        Cygnet has lost all its windows and rebuilds the last from full KV; the others have what
                                they have after the conversation (llama.cpp's slots are too short for it)

`hit` is what Cygnet reused of the shared tokens, and how many of the others it replayed for a window.

--check compares with `[branches]` in targets.toml: the ratio to the best peer of this run.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import BlockKey, RequestId
from cygnet.base.threads import usable_cpus
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.sizing import PoolSizes
from engine import (
    PEERS,
    WITH_CACHE,
    Measured,
    Prompts,
    Row,
    Worker,
    check,
    description,
    print_header,
    print_row,
    report,
    start,
)
from engine_limits import Limits, ModelWork

TAIL = 200
BLOCK = 16


@dataclass(frozen=True)
class Branch(Row):
    """`context` tokens are shared, `tail` tokens are new."""

    turns: tuple[int, ...] = ()
    """Tokens of the conversation when each of its requests came; each request repeats all before it."""
    evicted: bool = False
    """Whether Cygnet's retained windows are dropped before the branch."""


def branch(
    name: str,
    shared: int,
    turns: Iterable[int],
    *,
    engines: tuple[str, ...] = WITH_CACHE,
    evicted: bool = False,
    quick: bool = False,
) -> Branch:
    return Branch(
        name,
        "first_token",
        shared,
        tail=TAIL,
        rounds=3,
        engines=engines,
        unit="s",
        turns=tuple(turns),
        evicted=evicted,
        quick=quick,
    )


TURNS_OF_8K = tuple(range(1024, 8193, 1024))
ROWS = [
    branch("edit of an earlier turn", 4096, [6144, 8192], quick=True),
    branch("other user, same prompt", 4096, [8192]),
    branch("sub-agent", 4096, range(5120, 8193, 1024)),
    branch("other user, prompt of 3,000 tokens", 3000, [8192]),
    branch("edit, turn by turn", 4096, TURNS_OF_8K),
    branch("16K, windows evicted", 16384, [17408], engines=("cygnet", "vllm"), evicted=True),
]


@dataclass
class Branched(Measured):
    """With where Cygnet found the shared tokens, round by round."""

    hits: list[Mapping[str, int]] = field(default_factory=list)


def conversation(row: Branch, turn: int, prompts: Prompts) -> tuple[list[list[int]], list[int]]:
    """The requests of a round's conversation, and the one that branches off it."""
    whole = prompts.get(f"{row.name}, conversation {turn}", row.turns[-1])
    requests = [whole[:length] for length in row.turns]
    return requests, whole[: row.context] + prompts.get(f"{row.name}, branch {turn}", row.tail)


def measure(row: Branch, workers: Mapping[str, Worker], rounds: int, prompts: Prompts) -> Branched:
    """All engines of a row, in turns; every engine has the conversation just before its branch."""
    names = [name for name in row.engines if name in workers]
    measured = Branched(row, {name: [] for name in names})
    work = ModelWork(description(), row.weight_bytes)
    for turn in range(rounds):
        measured.limits.append(row.limit(Limits.measure(), work))
        requests, branched = conversation(row, turn, prompts)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            worker, ours = workers[name], name == "cygnet"
            for request in requests:
                worker.ask("warm", prompts=[request])
            if ours and row.evicted:
                worker.ask("forget_windows")
            measured.values[name].append(float(worker.ask("first_token", prompts=[branched], steps=1)["seconds"]))
            if ours:
                measured.hits.append(worker.ask("hit"))
    return measured


# ------------------------------------------------------------------ what retention rules give

RULES: tuple[tuple[str, ...], ...] = (
    (),
    ("prompt_end", "response_end"),
    ("prompt_end", "response_end", "geometric"),
    ("prompt_end", "response_end", "branch", "geometric"),
)


@dataclass(frozen=True)
class Retained:
    """What one set of rules keeps of a conversation, and what branches off it then compute."""

    rules: tuple[str, ...]
    windows: int
    swa_bytes: int
    """Of all windows; overlapping ones share blocks."""
    at_turns: float
    """Mean uncached tokens of a branch at the end of one of the turns, without its own tail."""
    anywhere: float
    """The same, of a branch at any block."""


def retained(geometry: KVGeometry, rules: tuple[str, ...], turns: Sequence[int], *, chunk: int = 1024) -> Retained:
    """Run a conversation through the KV manager, and ask what branches at every block would reuse."""
    blocks = 4 * turns[-1] // BLOCK + 1024
    sizes = PoolSizes(block_size=BLOCK, full_blocks=blocks, swa_blocks=blocks, max_model_len=turns[-1])
    kv = KVManager(geometry, sizes, KVPolicy(retention=rules))
    root, tokens = BlockKey(bytes(16)), list(range(turns[-1]))
    for number, length in enumerate(turns):
        request = kv.new(RequestId(f"turn {number}"), root, tokens[:length])
        plan = kv.plan(request, length)
        assert kv.admit(request, plan, full_room=0, swa_room=0, now_ns=number)
        for computed in [*range(plan.start + chunk, length, chunk), length]:
            assert kv.allocate(request, computed, number)
            kv.commit(request, tokens, computed, number)
        kv.free(request, len(turns))

    def uncached(shared: int) -> int:
        probe = kv.new(RequestId("probe"), root, tokens[:shared] + [-1] * BLOCK)
        return shared - kv.plan(probe, shared + BLOCK).start

    return Retained(
        rules,
        kv.tree.num_checkpoints,
        kv.tree.num_swa_blocks * geometry.swa.block_bytes(BLOCK),
        fmean(uncached(length) for length in turns),
        fmean(uncached(shared) for shared in range(BLOCK, turns[-1] + 1, BLOCK)),
    )


def print_retention(turns: Sequence[int]) -> list[Retained]:
    geometry = description().kv_geometry(2)
    full = geometry.full.block_bytes(BLOCK) * turns[-1] / BLOCK / (1 << 20)
    print(f"\na conversation of {turns[-1]} tokens in {len(turns)} requests: {full:.0f} MiB of full KV")
    print(f"{'retention rules':<52}{'windows':>9}{'MiB':>7}{'tokens computed: left at a turn':>33}{'anywhere':>10}")
    found = [retained(geometry, rules, turns) for rules in RULES]
    for one in found:
        rules, size = ", ".join(one.rules) or "none", one.swa_bytes / (1 << 20)
        print(f"{rules:<52}{one.windows:>9}{size:>7.0f}{one.at_turns:>33.0f}{one.anywhere:>10.0f}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Branches off a conversation, beside other engines, on CPUs.")
    parser.add_argument("--quick", action="store_true", help="one row, one round, without vLLM")
    parser.add_argument("--engines", nargs="+", choices=WITH_CACHE, metavar="NAME", help=f"of {', '.join(WITH_CACHE)}")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=0, help="instead of each row's own number")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument("--retention", action="store_true", help="only what retention rules save and weigh")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.retention:
        tables = [print_retention(turns) for turns in (TURNS_OF_8K, (8192,))]
        if options.json:
            kept = [vars(one) for table in tables for one in table]
            options.json.write_text(json.dumps(kept, indent=2) + "\n")
        return 0
    rows = [row for row in ROWS if row.quick or not options.quick]
    if options.rows:
        rows = [row for row in rows if any(text in row.name for text in options.rows)]
    if not rows:
        raise SystemExit(f"no row matches; there are {', '.join(row.name for row in ROWS)}")
    wanted = options.engines or [name for name in WITH_CACHE if not (options.quick and name == "vllm")]
    workers = start(list(wanted), options.threads, PEERS / "logs")
    if not workers:
        raise SystemExit("no engine is left to measure")
    results: list[Branched] = []
    try:
        prompts = Prompts()
        for worker in workers.values():  # what an engine compiles or allocates at first is not what is asked here
            worker.ask("warm", prompts=[prompts.get("first", 2048)])
        print_header(list(workers))
        for row in rows:
            results.append(measure(row, workers, options.rounds or (1 if options.quick else row.rounds), prompts))
            print_row(results[-1], list(workers))
            for hit in results[-1].hits[:1]:
                print(
                    f"{'':<6}hit: {hit['device']} of {row.context}, {hit['rebuilt']} of the rest replayed", flush=True
                )
        facts = {name: worker.ask("facts") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    if options.json:
        hits = {measured.row.name: measured.hits for measured in results}
        options.json.write_text(json.dumps({**report(results, facts, options), "hits": hits}, indent=2) + "\n")
    return check(results, "branches") if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
