"""A day of traffic in virtual time over three tiers: bookkeeping that audits clean, and memory that does not grow.

    python benchmarks/tier_soak.py [--quick] [--requests N] [--json FILE] [--check]

100,000 requests of agent sessions (turns that grow, shared system prompts, edits, aborts) over 24 hours go through the
real scheduler, trees and tier decisions. There is no model: a step takes no time, and the store is a table of keys that
loses some, fails sometimes and has room for a part. Every 1,000 requests all tiers are audited.

--check fails on any discrepancy and, in runs of 20,000 requests and more (by when all tiers are full), when Python's
live objects grow by more than `[tier_soak] max_growth` from the second quarter of the run to the last.
"""

import argparse
import gc
import json
import sys
import time
import tomllib
from collections import OrderedDict
from pathlib import Path
from random import Random
from statistics import median

import psutil
from rich.progress import track

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import SampledToken, StepResult
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager, LowerTiers
from cygnet.kv.policy import KVPolicy, TierPolicy
from cygnet.kv.sizing import HostSizes, PoolSizes
from cygnet.kv.store import ObjectKey, Outcome, namespace_of
from cygnet.kv.transfers import Fetch, Fetched, Found, Lookup, Put, StoreCommand, Stored, StoreResult
from provenance import environment

TARGETS = Path(__file__).parent / "targets.toml"
BLOCK = 64
DAY_S = 86_400
S = 1_000_000_000
GEOMETRY = KVGeometry(GroupGeometry(9, 4, 192, 128, 2), GroupGeometry(39, 8, 192, 128, 2, window=128))
"""MiMo-V2.5."""
VOCAB = 150_000
SAMPLES = 40
LONG_ENOUGH = 20_000


class KeyStore:
    """Keys of objects, least recently put first to go; loses one in a hundred reads and fails one in a thousand."""

    def __init__(self, capacity: int, rnd: Random) -> None:
        self._keys: OrderedDict[ObjectKey, None] = OrderedDict()
        self._capacity = capacity
        self._random = rnd

    def __len__(self) -> int:
        return len(self._keys)

    def answer(self, command: StoreCommand) -> StoreResult | None:
        """What becomes of a command; `None` for those that have no answer."""
        match command:
            case Lookup():
                count = 0
                while count < len(command.full) and command.full[count] in self._keys:
                    count += 1
                end = command.first + count
                first = max(command.swa_first, end - command.swa_reach)
                swa = command.swa[first - command.swa_first : end - command.swa_first]
                return Found(command.ticket, count, first, tuple(key in self._keys for key in swa))
            case Fetch():
                return Fetched(command.ticket, tuple(self._get(key) for key in command.keys))
            case Put():
                return Stored(command.ticket, tuple(self._put(key) for key in command.keys))
        return None

    def _get(self, key: ObjectKey) -> Outcome:
        chance = self._random.random()
        if chance < 0.01:
            self._keys.pop(key, None)
        return Outcome.FAILED if chance > 0.999 else Outcome.OK if key in self._keys else Outcome.MISS

    def _put(self, key: ObjectKey) -> Outcome:
        if self._random.random() > 0.999:
            return Outcome.FAILED
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return Outcome.OK


class Sessions:
    """Agent sessions without end, 200 at a time: a few system prompts, turns that grow a history, edits."""

    def __init__(self, rnd: Random) -> None:
        self._random = rnd
        self._systems = [self._tokens(rnd.randrange(500, 3000)) for _ in range(8)]
        self._open: list[list[int]] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    def next(self) -> list[int]:
        rnd = self._random
        if len(self._open) < 200:
            history = list(rnd.choice(self._systems))
        else:
            history = self._open.pop(rnd.randrange(len(self._open)))
            if rnd.random() < 0.1:
                del history[rnd.randrange(len(history) // 2, len(history)) :]
        history += self._tokens(rnd.randrange(20, 600))
        if len(history) < 12_000:
            self._open.append(history)
        return list(history)


class Day:
    """The engine's core, driven from request to request."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        policy = TierPolicy()
        namespace = namespace_of("soak", GEOMETRY, BLOCK, "bfloat16")
        lower = LowerTiers(HostSizes(BLOCK, 6000, 400), policy, namespace)
        self.kv = KVManager(GEOMETRY, PoolSizes(BLOCK, 1500, 120, 16_000), KVPolicy(seed=seed), lower=lower)
        self.core = EngineCore(
            self.kv, SchedulerPolicy(16, 4096), fingerprint="soak", vocab_size=VOCAB, max_requests=1000
        )
        self.store = KeyStore(30_000, self._random)
        self._sessions = Sessions(self._random)
        self._waiting: list[StoreCommand] = []
        self.now_ns = 0
        self.aborted = 0

    def request(self, name: str, gap_ns: int) -> None:
        """One more request; then steps, until few enough are left."""
        self.now_ns += gap_ns
        tokens = self._random.randrange(1, 40)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.core.add(AddRequest(name, self._sessions.next(), params), self.now_ns)
        if self._random.random() < 0.03:
            self.core.abort([name], self.now_ns)
            self.aborted += 1
        while self.core.num_requests > self._random.randrange(12):
            self.step()

    def step(self) -> bool:
        """One step, and some of what the store has to do; whether anything is left to do."""
        self.now_ns += S // 100
        self._waiting += self.core.take_store_commands()
        count = self._random.randint(0, len(self._waiting))
        done, self._waiting = self._waiting[:count], self._waiting[count:]
        results = [result for command in done if (result := self.store.answer(command)) is not None]
        self.core.store_results(results, self.now_ns)
        plan = self.core.schedule(self.now_ns)
        if plan is not None:
            token = SampledToken(self._random.randrange(VOCAB))
            self.core.apply(
                StepResult(plan.step, {r.request_id: token for r in plan.requests if r.sample}), self.now_ns
            )
        return self.core.wants_step or bool(self._waiting)

    def finish(self) -> None:
        """To the end of all requests and writes, and of what the trees hold."""
        while self.step():
            pass
        self.kv.flush()

    def left_over(self) -> list[str]:
        """Blocks that nothing holds and that are not free."""
        assert self.kv.host is not None
        pools = (self.kv.full_pool, self.kv.swa_pool, self.kv.host.full_pool, self.kv.host.swa_pool)
        return [f"{p.name} pool: {p.num_blocks - p.num_free} blocks leaked" for p in pools if p.num_free < p.num_blocks]


def run(num_requests: int, seed: int) -> dict[str, object]:
    """The day; what was found and how memory went."""
    day, faults, samples = Day(seed), [], []
    began = time.perf_counter()
    every = max(1, num_requests // SAMPLES)
    audit_every = min(1000, max(1, num_requests // 5))
    for index in track(range(num_requests), "requests", disable=not sys.stderr.isatty()):
        day.request(f"r{index}", DAY_S * S // num_requests)
        if (index + 1) % audit_every == 0:
            faults += day.core.audit()
        if (index + 1) % every == 0:
            gc.collect()
            samples.append((len(gc.get_objects()), psutil.Process().memory_info().rss))
    stats = day.core.stats()
    day.finish()
    faults += day.core.audit() + day.left_over()
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]

    def growth(place: int) -> float:
        return median(s[place] for s in last) / median(s[place] for s in second) - 1

    return {
        "requests": num_requests,
        "aborted": day.aborted,
        "virtual_hours": round(day.now_ns / 3600 / S, 2),
        "seconds": round(time.perf_counter() - began, 1),
        "prompt_tokens": stats.prefix_query_tokens_total,
        "hit_rate": round(stats.effective_hit_tokens_total / stats.prefix_query_tokens_total, 4),
        "preemptions": stats.preemptions_total,
        "faults": faults[:20],
        "object_growth": round(growth(0), 4),
        "resident_growth": round(growth(1), 4),
        "resident_mib": samples[-1][1] >> 20,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 requests: under a minute")
    parser.add_argument("--requests", type=int, default=0, help="how many [100,000]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args()
    found = run(args.requests or (2_000 if args.quick else 100_000), args.seed)
    for name, value in found.items():
        print(f"{name:18} {value}")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "result": found}, indent=2))
    if not args.check:
        return 0
    target = tomllib.loads(TARGETS.read_text())["tier_soak"]["max_growth"]
    missed = [f"audit: {fault}" for fault in found["faults"]]  # type: ignore[attr-defined]
    requests, growth = found["requests"], found["object_growth"]
    assert isinstance(requests, int)
    assert isinstance(growth, int | float)
    if requests >= LONG_ENOUGH and growth > target:
        missed.append(f"objects grew by {growth}, target {target}")
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
