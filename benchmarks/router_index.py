"""For `router.py`: what placing a very long prompt costs, and how good the index is on agent sessions."""

import asyncio
import gzip
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from router_targets import LOAD_CPU, free_port, process


def decisions(quick: bool) -> dict[str, float]:
    """p50 in µs of what a prompt of 1M tokens costs: reading its body, and placing it."""
    from cygnet.router.policies import POLICIES, Ask, Weights
    from cygnet.router.prompt import KeySettings, read_prompt
    from cygnet.router.runtime.redis_state import RedisState
    from cygnet.router.state import Decision, RouteRequest
    from cygnet.router.view import Member, WorkerRecord

    keys = KeySettings()
    text = "words of a long prompt " * 174_000
    rounds = 20 if quick else 100

    def body(turn: int) -> bytes:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "more " * 40 * turn}]
        return json.dumps({"model": "m", "messages": messages}).encode()

    async def place(url: str) -> list[float]:
        state = RedisState(url, "bench", 1.0, 1_800_000, 30_000)
        await state.pipe.wait_ready(10)
        members = []
        for number in range(16):
            worker = f"http://worker-{number}:1"
            slot = await state.join(WorkerRecord(url=worker))
            assert slot is not None
            members.append(Member(slot, worker))
        plan = POLICIES.get("cache_aware")(Ask(b"", b"", 0, 0.0), members, {}, Weights())
        times = []
        for turn in range(rounds):
            prompt = read_prompt(body(turn), keys)
            placed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            request = RouteRequest(f"r{turn}", prompt.chain, prompt.tokens, keys.block_tokens, plan, 0.5)
            begin = time.perf_counter()
            state.route(request, placed.set_result)
            decision = await placed
            times.append((time.perf_counter() - begin) * 1e6)
            assert isinstance(decision, Decision)
            state.release(request.request_id)
        await state.aclose()
        return times[1:]

    reads = []
    for turn in range(rounds):
        data = body(turn)
        begin = time.perf_counter()
        read_prompt(data, keys)
        reads.append((time.perf_counter() - begin) * 1e6)
    out = {"read_body_us": statistics.median(reads)}
    if shutil.which("redis-server"):
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            redis = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
            with process(redis, LOAD_CPU, stdout=subprocess.DEVNULL):
                out["redis_route_us"] = statistics.median(uvloop.run(place(f"redis://127.0.0.1:{port}")))
    return out


def replay(traces: Path, quick: bool) -> dict[str, float]:
    """Agent sessions over 16 workers: tokens that the index found on the chosen workers, beside those truly there."""
    from xxhash import xxh3_64_digest

    from cygnet.router.config import CacheSettings
    from cygnet.router.local_state import LocalState
    from cygnet.router.policies import POLICIES, Ask, Weights
    from cygnet.router.state import Decision, RouteRequest
    from cygnet.router.view import Member, WorkerRecord

    requests: list[tuple[float, int, int, int, bytes]] = []
    with gzip.open(traces / "agentic" / "sessions_512.jsonl.gz", "rt") as lines:
        for number, line in enumerate(lines):
            if quick and number == 60:
                break
            session = json.loads(line)
            ids: list[int] = []
            for t, tokens, _, _, _, _, kept, new in session["requests"]:
                ids = ids[:kept] + new
                keys, key = [], number.to_bytes(8, "little")
                for block in ids:
                    key = xxh3_64_digest(key + int(block).to_bytes(8, "little", signed=True))
                    keys.append(key)
                requests.append((number * 30.0 + t, number, tokens, len(ids), b"".join(keys)))
    requests.sort(key=lambda request: request[:2])
    now, cache = 0, CacheSettings()
    state = LocalState(lambda: now, ttl_ns=int(cache.ttl_s * 1e9), lease_ns=10**18, max_entries=cache.max_entries)
    members = [Member(slot, f"http://worker-{slot}:1") for slot in range(16)]

    async def join() -> None:
        for member in members:
            await state.join(WorkerRecord(url=member.url))

    asyncio.run(join())
    plan = POLICIES.get("cache_aware")(Ask(b"", b"", 0, 0.0), members, {}, Weights())
    truth: list[set[bytes]] = [set() for _ in members]
    found = held = anywhere = total = 0
    answers: list[Any] = []
    began = time.perf_counter()
    for turn, (at, _, tokens, blocks, chain) in enumerate(requests):
        now = int(at * 1e9)
        state.route(RouteRequest(str(turn), chain, tokens, 512, plan, (turn * 0.618) % 1), answers.append)
        decision = answers.pop()
        assert isinstance(decision, Decision)
        state.release(str(turn - 16))
        keys = [chain[i : i + 8] for i in range(0, blocks * 8, 8)]
        depths = [
            next((i for i, key in enumerate(keys) if key not in known), blocks) for known in (truth[decision.slot],)
        ]
        found += min(decision.matched_tokens, tokens)
        held += min(depths[0] * 512, tokens)
        everywhere = set().union(*(known & set(keys) for known in truth))
        anywhere += min(next((i for i, key in enumerate(keys) if key not in everywhere), blocks) * 512, tokens)
        total += tokens
        truth[decision.slot].update(keys)
    return {
        "requests": len(requests),
        "found": found / total,
        "held_by_chosen": held / total,
        "held_by_any": anywhere / total,
        "us_per_request": (time.perf_counter() - began) / len(requests) * 1e6,
        "entries": len(state.index),
    }
