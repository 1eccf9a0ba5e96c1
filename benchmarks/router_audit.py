"""What is left in Redis after many requests of two routers while workers come and go: nothing of those that left, no
load, no lease.

    python benchmarks/router_audit.py [--requests 100000] [--json FILE]

Needs redis-server. Every match is compared with what that incarnation of the worker was really sent.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from xxhash import xxh3_64_digest

from cygnet.router.policies import POLICIES, Ask, Weights
from cygnet.router.runtime.redis_state import RedisState
from cygnet.router.state import Decision, RouteRequest
from cygnet.router.view import Member, WorkerRecord
from provenance import environment
from router_targets import LOAD_CPU, free_port, process

WORKERS, SESSIONS, RUNNING = 16, 64, 32
BLOCK_TOKENS = 512
TTL_MS = 3_000
CHURN_EVERY = 250


@dataclass
class Session:
    """Its keys grow by some blocks with every turn; now and then it begins anew."""

    keys: list[bytes] = field(default_factory=list)

    def turn(self, random: Random) -> list[bytes]:
        if len(self.keys) > 200 or not self.keys:
            self.keys = [random.randbytes(8)]
        for _ in range(random.randint(1, 6)):
            self.keys.append(xxh3_64_digest(self.keys[-1] + random.randbytes(4)))
        return self.keys


class Audit:
    """Two routers over one Redis, and the truth about who was sent what."""

    def __init__(self, url: str, random: Random) -> None:
        self.routers = [RedisState(url, "audit", 5.0, TTL_MS, 60_000) for _ in range(2)]
        self.random = random
        self.sessions = [Session() for _ in range(SESSIONS)]
        self.slots: dict[str, int] = {}
        self.sent: dict[int, set[bytes]] = {}
        self.members: list[Member] = []
        self.running: list[str] = []
        self.restarts = self.false_matches = self.matched = self.tokens = 0

    async def begin(self) -> None:
        for state in self.routers:
            if not await state.pipe.wait_ready(10):
                raise SystemExit("redis-server does not answer")
        for number in range(WORKERS):
            await self._place_worker(f"http://worker-{number}:1")

    async def _place_worker(self, url: str) -> None:
        state = self.random.choice(self.routers)
        slot = await (state.restart(url, self.slots[url]) if url in self.slots else state.join(WorkerRecord(url=url)))
        assert slot is not None
        self.slots[url], self.sent[slot] = slot, set()
        self.members = [Member(slot, url) for url, slot in self.slots.items()]

    async def request(self, name: str) -> None:
        keys = self.random.choice(self.sessions).turn(self.random)
        chain, tokens = b"".join(keys), len(keys) * BLOCK_TOKENS
        plan = POLICIES.get("cache_aware")(Ask(b"", b"", 0, 0.0), self.members, {}, Weights())
        placed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        state = self.random.choice(self.routers)
        state.route(RouteRequest(name, chain, tokens, BLOCK_TOKENS, plan, self.random.random()), placed.set_result)
        decision = await placed
        assert isinstance(decision, Decision)
        assert decision.shared
        sent = self.sent[decision.slot]
        self.false_matches += any(key not in sent for key in keys[: decision.matched_tokens // BLOCK_TOKENS])
        self.matched, self.tokens = self.matched + decision.matched_tokens, self.tokens + tokens
        sent.update(keys)
        self.running.append(name)
        if len(self.running) > RUNNING:
            self.random.choice(self.routers).release(self.running.pop(self.random.randrange(RUNNING)))

    async def churn(self) -> None:
        """A worker has lost its memory."""
        self.restarts += 1
        await self._place_worker(self.random.choice(list(self.slots)))

    async def left(self) -> dict[str, int]:
        """What is there once nothing runs and the prefixes have expired."""
        for name in self.running:
            self.routers[1].release(name)
        await self.routers[0].loads()  # each sends its releases before it asks
        loads = await self.routers[1].loads()
        await asyncio.sleep(TTL_MS / 1000 * 1.5)  # Redis expires by the clock
        pipe = self.routers[0].pipe
        prefixes = [key for key in await pipe.ask((b"KEYS", b"*")) if b":b:" in key]
        held, leases = await pipe.ask((b"HLEN", b"{audit}:held")), await pipe.ask((b"ZCARD", b"{audit}:lease"))
        registered = len((await self.routers[0].roster()).workers)
        return {
            "loads": len(loads),
            "leases": held + leases,
            "prefixes": len(prefixes),
            "workers_too_many": registered - WORKERS,
        }


async def run(url: str, requests: int) -> dict[str, float]:
    audit = Audit(url, Random(7))
    await audit.begin()
    began = time.perf_counter()
    for turn in range(requests):
        if turn % CHURN_EVERY == CHURN_EVERY - 1:
            await audit.churn()
        await audit.request(f"r{turn}")
    took = time.perf_counter() - began
    out: dict[str, float] = {"requests": requests, "restarts": audit.restarts, "seconds": took}
    out |= {"hit_rate": audit.matched / audit.tokens, "false_matches": audit.false_matches}
    out["slots_used"] = len(audit.sent)
    out |= {f"left_{name}": count for name, count in (await audit.left()).items()}
    for state in audit.routers:
        await state.aclose()
    return out


def audited(requests: int) -> dict[str, float]:
    """Start a Redis, run, and give figures."""
    if not shutil.which("redis-server"):
        raise SystemExit("needs redis-server (Debian: apt-get install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        redis = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with process(redis, LOAD_CPU, stdout=subprocess.DEVNULL):
            return uvloop.run(run(f"redis://127.0.0.1:{port}", requests))


def wrong(figures: dict[str, float]) -> list[str]:
    """What should be 0 and is not."""
    return [name for name in figures if (name.startswith("left_") or name == "false_matches") and figures[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    args = parser.parse_args()
    figures = audited(args.requests)
    for name, value in figures.items():
        print(f"{name:24}{value:>12.5g}")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "figures": figures}, indent=1))
    if wrong(figures):
        raise SystemExit(f"should be 0: {', '.join(wrong(figures))}")


if __name__ == "__main__":
    main()
