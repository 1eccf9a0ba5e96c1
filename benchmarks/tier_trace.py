"""A real load over the tiers, for `tiers.py --trace`: agents' sessions against `cygnet serve` with a small device pool.

`cygnet bench serve --trace` sends the first turns of the trace's first sessions, all sessions at once, each turn as
soon as the answer before is there. The device pool is a tenth of the working set (the KV of all distinct blocks,
and one window per session), so without lower tiers most of what a session comes back to has gone. Servers:

    all in L1     a device pool of twice the working set: what more tiers can come to at best
    L1            a tenth, and no other tier
    L1 + L2       with host memory of twice the working set
    L1 + L2 + L3  with a store as well
    restarted     the same again, on the store that the server before has left

Sessions are those of `agent_text`, whose prompts are text of real agents; long prompts lose their end.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.cli.bench.traces import load_trace
from cygnet.cli.child import ChildServer
from cygnet.kv.hashing import extend_keys
from cygnet.kv.sizing import min_pools
from cygnet.model.source import find_model
from cygnet.model.tokenizer import Tokenizer
from cygnet.sim.sessions import Session, limited
from engine import description
from provenance import environment

DEFAULT_TRACE = Path(__file__).parent.parent.parent / "shared/traces/agent_text/agent_traces.jsonl.gz"
BLOCK = 16
CHUNK = 512
"""Tokens per step. A pool must hold a window and a chunk of SWA KV, which with more would be all of the tenth."""
OUTPUT = 16
BENCH_S = 900


@dataclass(frozen=True)
class Load:
    """What is sent."""

    sessions: int
    turns: int
    max_input: int
    """In tokens as the bench estimates them, 4 bytes each."""


FULL = Load(sessions=16, turns=3, max_input=2500)
QUICK = Load(sessions=5, turns=2, max_input=2000)


@dataclass(frozen=True)
class WorkingSet:
    """What a load would leave cached if nothing were evicted."""

    num_requests: int
    num_tokens: int
    """Of all prompts."""
    distinct_tokens: int
    longest: int
    num_sessions: int

    def num_bytes(self, geometry: KVGeometry) -> int:
        """Full KV of every distinct block, and one window per session."""
        window = geometry.window_blocks(BLOCK) * geometry.swa.block_bytes(BLOCK)
        return self.distinct_tokens // BLOCK * geometry.full.block_bytes(BLOCK) + self.num_sessions * window


def working_set(prompts: Sequence[Sequence[Sequence[int]]]) -> WorkingSet:
    """Of sessions of prompts of token ids."""
    seen: set[BlockKey] = set()
    for session in prompts:
        for prompt in session:
            keys: list[BlockKey] = []
            extend_keys(keys, BlockKey(bytes(16)), prompt, BLOCK, len(prompt))
            seen.update(keys)
    lengths = [len(prompt) for session in prompts for prompt in session]
    return WorkingSet(len(lengths), sum(lengths), len(seen) * BLOCK, max(lengths), len(prompts))


def tokenized(sessions: Sequence[Session], load: Load, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The prompts that the bench will send."""
    shorter = [replace(session, turns=session.turns[: load.turns]) for session in sessions]
    fitted, _ = limited(shorter, max_input=load.max_input, max_output=OUTPUT, max_total=None)
    return [[tokenizer.encode(turn.text or "") for turn in session.turns] for session in fitted]


def device_bytes(whole: WorkingSet, geometry: KVGeometry) -> int:
    """A tenth of the working set, or the least that serves its longest prompt."""
    length = whole.longest + OUTPUT + BLOCK
    least = min_pools(geometry, block_size=BLOCK, chunk=CHUNK, model_max_len=length, max_model_len=length)
    return max(whole.num_bytes(geometry) // 10, least.num_bytes)


def servers(whole: int, device: int, store: Path, *, quick: bool) -> dict[str, dict[str, object]]:
    """Name and settings of every server, in the order in which they run."""
    host, on_disk = 2 * whole, f"{store}:{max(4 * whole, 1 << 30)}"
    found: dict[str, dict[str, object]] = {
        "all in L1": {"kv.memory": 2 * whole, "kv.host_cache": "off"},
        "L1": {"kv.memory": device, "kv.host_cache": "off"},
        "L1 + L2": {"kv.memory": device, "kv.host_cache": host},
        "L1 + L2 + L3": {"kv.memory": device, "kv.host_cache": host, "kv.store": on_disk},
        "restarted": {"kv.memory": device, "kv.host_cache": host, "kv.store": on_disk},
    }
    return {name: settings for name, settings in found.items() if not quick or name != "all in L1"}


def bench(url: str, trace: Path, load: Load, result: Path) -> dict[str, Any]:
    """`cygnet bench serve` against a server; what it wrote."""
    command = [sys.executable, "-m", "cygnet.cli.main", "bench", "serve", "--url", url, "--trace", str(trace)]
    command += ["--num-prompts", str(load.sessions), "--turns", str(load.turns), "--concurrency", str(load.sessions)]
    command += ["--input-len", str(load.max_input), "--output-len", str(OUTPUT), "--json", str(result)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S, check=False)
    if ran.returncode or not result.exists():
        raise RuntimeError(f"cygnet bench serve ended with {ran.returncode}: {ran.stdout[-800:]}{ran.stderr[-800:]}")
    report: dict[str, Any] = json.loads(result.read_bytes())
    failed = report["summary"]["failed"]
    if failed:
        raise RuntimeError(f"{failed} requests failed: {report['summary']['failure_examples']}")
    return report


def run_trace(options: argparse.Namespace, folder: Path) -> int:
    """All servers, one after the other; exit status."""
    if not options.trace.exists():
        raise SystemExit(f"no trace {options.trace}: give one after --trace (see `cygnet bench serve --help`)")
    load = QUICK if options.quick else FULL
    geometry = description().kv_geometry(2)
    sessions = load_trace(options.trace, load.sessions)
    whole = working_set(tokenized(sessions, load, find_model("gemma3-270m").tokenizer()))
    size, device = whole.num_bytes(geometry), device_bytes(whole, geometry)
    print(
        f"{whole.num_requests} requests in {whole.num_sessions} sessions, {whole.num_tokens} prompt tokens, "
        f"{whole.distinct_tokens} distinct: {size / 2**20:.0f} MiB of KV; device pool {device / 2**20:.0f} MiB, "
        f"{device / size:.0%} of it\n"
    )
    print(f"{'':<16}{'TTFT p50':>10}{'mean':>9}{'p90 ms':>9}{'cached':>9}{'req/s':>8}{'tok/s':>9}{'seconds':>9}")
    results: dict[str, dict[str, Any]] = {}
    for name, settings in servers(size, device, folder / "store", quick=options.quick).items():
        settings = {**settings, "engine.max_num_batched_tokens": CHUNK, "kv.dtype": "bfloat16"}
        settings["model.max_model_len"] = whole.longest + OUTPUT + BLOCK  # of a small pool most would go to windows
        sets = [f"{key}={value}" for key, value in settings.items()]
        with ChildServer("gemma3-270m", sets) as server:
            report = results[name] = bench(server.url, options.trace.resolve(), load, folder / "bench.json")
        one = report["summary"]
        print(
            f"{name:<16}{one['ttft_ms']['median']:>10,.0f}{one['ttft_ms']['mean']:>9,.0f}{one['ttft_ms']['p90']:>9,.0f}"
            f"{one['cached_share'] or 0:>9.1%}{one['request_throughput']:>8.2f}{one['total_throughput']:>9,.0f}"
            f"{one['duration_s']:>9.1f}",
            flush=True,
        )
    if options.json:
        document = {
            "config": {"trace": options.trace.name, **vars(load), "output": OUTPUT, "device_bytes": device},
            "working_set": {**vars(whole), "bytes": size},
            "environment": environment(),
            "results": {
                name: {key: report[key] for key in ("summary", "settings", "server_counters")}
                for name, report in results.items()
            },
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0
