"""What the router costs: CPU per request, added latency, long bodies; beside no router at all and nginx; and how good
its index is.

Mock workers, the load and the router are processes of their own on one machine; with two CPUs or more the router has
one to itself. CPU per request is user + system time of the router's processes over the requests served, and the
steadiest column on a shared machine.

    python benchmarks/router.py [--quick] [--json FILE] [--check] [--only NAME ...] [--traces FOLDER]
"""

import argparse
import asyncio
import gzip
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import uvloop

from provenance import environment

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
ROUTER_CPU, LOAD_CPU = 0, 1
DELAY_MS = 50


# --- a worker: answers as the path's numbers say, /delay_ms/events/...


class MockWorker(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.begin()

    def begin(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.head: dict[bytes, bytes] = {}
        self.url = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-mock":
            self.head[b"x-mock"] = value

    def on_message_complete(self) -> None:
        delay_ms, events = map(int, self.head.pop(b"x-mock", b"0 0").split())
        url, self.url = self.url, b""
        answer = _worker_answer(url, events)
        if delay_ms:
            asyncio.get_running_loop().call_later(delay_ms / 1000, self.transport.write, answer)
        else:
            self.transport.write(answer)


def _worker_answer(url: bytes, events: int) -> bytes:
    if url == b"/v1/models":
        return _whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    if not events:
        return _whole(
            b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"' + b"y" * 200 + b'"}}]}'
        )
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk * events
        + b"0\r\n\r\n"
    )


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def run_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(MockWorker, "127.0.0.1", port)
    await server.serve_forever()


# --- the load


@dataclass
class Tally:
    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    errors: int = 0


class Caller(asyncio.Protocol):
    """One keep-alive connection that asks again as soon as it is answered, until time is up."""

    def __init__(self, requests: list[bytes], start: int, until: float, tally: Tally, done: Callable[[], None]) -> None:
        self.requests, self.turn, self.until, self.tally, self.done = requests, start, until, tally, done

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.turn += 1
        self.began, self.first = time.perf_counter(), 0.0
        self.transport.write(self.requests[self.turn % len(self.requests)])

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if self.parser.get_status_code() != 200:
            self.tally.errors += 1
        self.tally.first_ms.append(((self.first or now) - self.began) * 1000)
        self.tally.total_ms.append((now - self.began) * 1000)
        if now < self.until:
            asyncio.get_running_loop().call_soon(self.ask)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.done()


async def run_load(port: int, callers: int, seconds: float, body_bytes: int, mock: str) -> None:
    """Print a JSON object: requests, errors, seconds, latencies."""
    sessions = 64 if body_bytes < 1 << 20 else 4
    requests = [_request(number, body_bytes, mock) for number in range(sessions)]
    tally, left = Tally(), callers
    finished = asyncio.Event()

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set()

    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    for number in range(callers):
        await loop.create_connection(
            lambda n=number: Caller(requests, n * 7, begin + seconds, tally, done), "127.0.0.1", port
        )
    await finished.wait()
    took = time.perf_counter() - begin
    first, total = sorted(tally.first_ms), sorted(tally.total_ms)
    out = {"requests": len(total), "errors": tally.errors, "seconds": took}
    for name, values in (("first", first), ("total", total)):
        out |= {f"{name}_p50_ms": _quantile(values, 0.5), f"{name}_p99_ms": _quantile(values, 0.99)}
    print(json.dumps(out))


def _request(number: int, body_bytes: int, mock: str) -> bytes:
    text = f"session {number} " + "words of a prompt " * (body_bytes // 18)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": mock[-2:] != " 0"})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer key\r\nX-Mock: {mock}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def _quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


# --- processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(cpu: int) -> Callable[[], None] | None:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    return (lambda: os.sched_setaffinity(0, {cpus[cpu]})) if len(cpus) > 1 else None


@contextmanager
def process(command: list[str], cpu: int, **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen(command, preexec_fn=pinned(cpu), **more)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for(port: int, path: str = "/health") -> None:
    """Until GET `path` answers 200."""
    import http.client

    end = time.monotonic() + 20
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise SystemExit(f"nothing answers on port {port}")
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    total = 0.0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (str(pid), *children):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 8m; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream workers {{ {servers} keepalive 64; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


@contextmanager
def target(name: str, workers: list[int], redis_port: int | None, folder: Path) -> Iterator[tuple[int, int | None]]:
    """Port to send to, and the pid whose CPU counts."""
    if name == "direct":
        yield workers[0], None
        return
    port = free_port()
    if name == "nginx":
        own = folder / "nginx"
        own.mkdir()
        servers = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
        conf = own / "nginx.conf"
        conf.write_text(NGINX.format(folder=own, port=port, servers=servers))
        command = ["nginx", "-p", str(own), "-c", str(conf)]
    else:
        command = [sys.executable, "-m", "cygnet.cli.main", "router", "--port", str(port), "--api-key", "key"]
        command += ["--policy", "round_robin" if name == "cygnet rr" else "cache_aware"]
        for worker in workers:
            command += ["--worker", f"http://127.0.0.1:{worker}"]
        if name == "cygnet redis":
            command += ["--redis", f"redis://127.0.0.1:{redis_port}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with process(command, ROUTER_CPU, **quiet) as child:
        wait_for(port, "/v1/models" if name == "nginx" else "/ready")
        yield port, child.pid


@dataclass(frozen=True)
class Shape:
    """One kind of load. `mock`: delay in ms and events of the worker's answer."""

    name: str
    callers: int
    body_bytes: int
    mock: str
    seconds: float = 3.0


SHAPES = (
    Shape("plain", 32, 4000, "0 0"),
    Shape("16 events", 32, 4000, "0 16"),
    Shape("100 events", 32, 4000, "0 100"),
    Shape(f"plain, {DELAY_MS} ms worker", 32, 4000, f"{DELAY_MS} 0"),
    Shape(f"16 events, {DELAY_MS} ms worker", 32, 4000, f"{DELAY_MS} 16"),
    Shape("220 KB, 16 events", 20, 220_000, "0 16"),
    Shape("4 MB", 4, 4_000_000, "0 0"),
)


def measure(port: int, pid: int | None, shape: Shape, seconds: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--role", "load", "--port", str(port), "--callers", str(shape.callers)]
    command += ["--seconds", str(seconds), "--body-bytes", str(shape.body_bytes), "--mock", shape.mock]
    before = cpu_seconds(pid) if pid else 0.0
    done = subprocess.run(command, preexec_fn=pinned(LOAD_CPU), capture_output=True, check=True, timeout=seconds + 60)
    after = cpu_seconds(pid) if pid else 0.0
    out: dict[str, float] = json.loads(done.stdout)
    if out["errors"]:
        raise SystemExit(f"{shape.name}: {out['errors']:.0f} of {out['requests']:.0f} requests failed")
    out["rps"] = out["requests"] / out["seconds"]
    if pid:
        out["cpu_us"] = (after - before) / out["requests"] * 1e6
    return out


def compare(quick: bool, only: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by target and shape. Shapes of all targets take turns, so that they meet the same noise."""
    rounds, seconds = (1, 0.6) if quick else (3, 3.0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [free_port() for _ in range(2)]
        for port in workers:
            role = [sys.executable, __file__, "--role", "worker", "--port", str(port)]
            stack.enter_context(process(role, LOAD_CPU))
        names = ["direct", "cygnet rr", "cygnet"]
        redis_port = None
        if shutil.which("redis-server"):
            redis_port = free_port()
            redis = ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(folder)]
            stack.enter_context(process(redis, LOAD_CPU, stdout=subprocess.DEVNULL))
            names.append("cygnet redis")
        if shutil.which("nginx"):
            names.insert(1, "nginx")
        names = [name for name in names if not only or name in only]
        for port in workers:
            wait_for(port)
        targets = {name: stack.enter_context(target(name, workers, redis_port, folder)) for name in names}
        results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
        for port, pid in targets.values():
            measure(port, pid, SHAPES[0], 0.5)  # warm
        for shape in SHAPES:
            for _ in range(rounds):
                for name, (port, pid) in targets.items():
                    one = measure(port, pid, shape, seconds)
                    best = results[name].get(shape.name)
                    better = {key: min(best[key], one[key]) for key in one if key != "rps"} if best else one
                    better["rps"] = max(best["rps"], one["rps"]) if best else one["rps"]
                    results[name][shape.name] = better
        return results


# --- decisions and the index


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
                chain, key = [], number.to_bytes(8, "little")
                for block in ids:
                    key = xxh3_64_digest(key + int(block).to_bytes(8, "little", signed=True))
                    chain.append(key)
                requests.append((number * 30.0 + t, number, tokens, len(ids), b"".join(chain)))
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


# --- reports


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for shape in SHAPES:
        lines.append(f"\n{shape.name} ({shape.callers} callers)")
        lines.append(
            f"  {'':14}{'CPU us/req':>11}{'req/s':>9}{'first p50':>11}{'p99':>8}{'total p50':>11}{'p99':>8} ms"
        )
        for name, by_shape in results.items():
            one = by_shape[shape.name]
            cpu = f"{one['cpu_us']:.0f}" if "cpu_us" in one else "-"
            lines.append(
                f"  {name:14}{cpu:>11}{one['rps']:>9.0f}{one['first_p50_ms']:>11.2f}{one['first_p99_ms']:>8.2f}"
                f"{one['total_p50_ms']:>11.2f}{one['total_p99_ms']:>8.2f}"
            )
    return "\n".join(lines)


def check(report: dict[str, Any]) -> list[str]:
    """What misses `targets.toml`."""
    limits = tomllib.loads((HERE / "targets.toml").read_text())["router"]
    missed = []

    def at_most(name: str, value: float, limit: float) -> None:
        print(f"{'ok  ' if value <= limit else 'MISS'} {name}: {value:.3f}, at most {limit}")
        if value > limit:
            missed.append(name)

    results = report["compare"]
    for name in ("cygnet", "cygnet redis"):
        if name in results:
            at_most(f"{name}: CPU us per plain request", results[name]["plain"]["cpu_us"], limits["max_plain_cpu_us"])
            at_most(
                f"{name}: added ms p50, plain, {DELAY_MS} ms worker",
                results[name][f"plain, {DELAY_MS} ms worker"]["total_p50_ms"]
                - results["direct"][f"plain, {DELAY_MS} ms worker"]["total_p50_ms"],
                limits["max_added_p50_ms"],
            )
            at_most(
                f"{name}: 4 MB bodies, of direct",
                results[name]["4 MB"]["total_p50_ms"] / results["direct"]["4 MB"]["total_p50_ms"],
                limits["max_4mb_of_direct"],
            )
    if "redis_route_us" in report["decisions"]:
        at_most("1M-token decision, ms", report["decisions"]["redis_route_us"] / 1000, limits["max_decision_1m_ms"])
    if report["replay"]:
        missing = 1 - report["replay"]["found"] / report["replay"]["held_by_chosen"]
        at_most("agent sessions: hits missed of an infinite index's", missing, limits["max_hits_missed"])
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--check", action="store_true", help="compare with targets.toml; exit 1 on a miss")
    parser.add_argument("--only", nargs="*", default=[], help="of direct, nginx, cygnet rr, cygnet, cygnet redis")
    parser.add_argument("--traces", type=Path, help="folder of request traces, for the hit rate of the index")
    for name, kind in (("role", str), ("port", int), ("callers", int), ("seconds", float), ("body-bytes", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--mock", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "worker":
        uvloop.run(run_worker(args.port))
        return
    if args.role == "load":
        uvloop.run(run_load(args.port, args.callers, args.seconds, args.body_bytes, args.mock))
        return
    report: dict[str, Any] = {"environment": environment(), "quick": args.quick}
    report["decisions"] = decisions(args.quick)
    report["replay"] = replay(args.traces, args.quick) if args.traces else {}
    report["compare"] = compare(args.quick, args.only)
    print(table(report["compare"]))
    print("\n1M-token prompt: " + ", ".join(f"{name} {value:.0f}" for name, value in report["decisions"].items()))
    if report["replay"]:
        print("agent sessions: " + ", ".join(f"{name} {value:.5g}" for name, value in report["replay"].items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    if args.check and check(report):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
