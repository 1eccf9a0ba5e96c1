"""What faults cost callers: a router (or two) with Redis before four workers, all processes of their own, under load;
one fault after the other. Printed for each: how the callers' requests ended, and how long the fault was felt.

lost      no byte of an answer, although the caller stayed
twice     answered to the end by two workers
broken    off within the answer; `due` are those whose worker or router died or stopped with the answer under way
refused   answered 429, 502, 503 or 504
resent    the router closed the connection as the request came, which no worker has seen: the caller sent it again
felt s    from the fault to the end of the last request that failed or took a second longer than usual
left      tokens of load that are still booked when all is over

    python benchmarks/router_faults.py [--quick] [--only NAME ...] [--check] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from fault_load import Callers, Habits, get
from provenance import environment
from router_targets import free_port

HERE = Path(__file__).parent
WORKERS = 4
START_S = 180.0
SETTINGS = (
    "server.access_log=false",
    "server.max_connections=12000",
    "workers.probe_s=0.5",
    "workers.first_byte_s=4",
    "workers.between_bytes_s=4",
    "workers.breaker_open_s=1",
    "redis.lease_s=5",
)
REFUSALS = ("429", "502", "503", "504")


@dataclass
class Row:
    """One fault's figures."""

    name: str
    requests: int = 0
    ok: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    broken: int = 0
    due: int = 0
    refused: int = 0
    resent: int = 0
    felt_s: float = 0.0
    usual_s: float = 0.0
    left: int = 0
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def misses(self) -> list[str]:
        """What must not be and is."""
        found = [f"{name} {getattr(self, name)}" for name in ("lost", "twice", "wrong", "refused", "left")]
        found = [text for text in found if not text.endswith(" 0")]
        if self.broken > self.due:
            found.append(f"broken {self.broken}, {self.due} due")
        if not self.ok:
            found.append("no request was served")
        return found + [f"{name} {value:g}" for name, value in self.notes.items() if name.startswith("not ") and value]


class Rig:
    """The processes, and callers in this one."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.worker_ports = [free_port() for _ in range(WORKERS)]
        self.router_ports = [free_port(), free_port()]
        self.redis_port = free_port()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.struck: set[str] = set()
        """Workers that died or stopped."""
        self.row = Row("")

    def seconds(self, quick: float, full: float) -> float:
        return quick if self.quick else full

    async def spawn(self, name: str, *command: str) -> None:
        self.processes[name] = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=(self.folder / f"{name}.err").open("a")
        )

    async def start(self, name: str) -> None:
        """Start worker-N, router-N or redis, and wait until it serves."""
        kind, _, number = name.partition("-")
        if kind == "redis":
            command = ["redis-server", "--port", str(self.redis_port), "--save", "", "--dir", str(self.folder)]
            await self.spawn(name, *command, "--bind", "127.0.0.1")
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.redis_port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)
        if kind == "worker":
            port, path = self.worker_ports[int(number)], "/health"
            await self.spawn(name, sys.executable, str(HERE / "fault_load.py"), str(port), str(self.journal(name)))
        else:
            port, path = self.router_ports[int(number)], "/ready"
            command = [sys.executable, "-m", "cygnet.cli.main", "router", "--port", str(port)]
            command += ["--redis", f"redis://127.0.0.1:{self.redis_port}"]
            for setting in SETTINGS:
                command += ["--set", setting]
            for worker in self.worker_ports:
                command += ["--worker", f"http://127.0.0.1:{worker}"]
            await self.spawn(name, *command)
        end = time.monotonic() + START_S
        while True:
            with suppress(OSError, ValueError, TimeoutError):
                if (await get(port, path)) in ({}, {"ready": True}):
                    return
            if time.monotonic() > end:
                raise SystemExit(f"{name} does not start:\n{(self.folder / f'{name}.err').read_text()[-2000:]}")
            await asyncio.sleep(0.05)

    def journal(self, name: str) -> Path:
        return self.folder / f"{name}.journal"

    def entries(self) -> list[tuple[str, str, str]]:
        """(worker, what, request) of all journals."""
        found = []
        for number in range(WORKERS):
            path = self.journal(f"worker-{number}")
            for line in path.read_text().splitlines() if path.exists() else ():
                what, _, request = line.partition(" ")
                found.append((path.stem, what, request))
        return found

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        """kill -9."""
        self.send(name, signal.SIGKILL)
        await self.processes[name].wait()
        self.struck.add(name)

    async def without(self, name: str, seconds: float) -> None:
        """kill -9, and start it again so long after."""
        await self.kill(name)
        await asyncio.sleep(seconds)
        await self.start(name)

    async def between(self, name: str, first: signal.Signals, last: signal.Signals, seconds: float) -> None:
        """Send it a signal, and another so long after."""
        self.send(name, first)
        await asyncio.sleep(seconds)
        self.send(name, last)

    def due(self) -> set[str]:
        """Requests whose answer had begun and was not ended at what was struck; those of a router, anywhere."""
        begun: set[str] = set()
        whole: set[str] = set()
        everywhere = any(name.startswith("router") for name in self.struck)
        for name, what, request in self.entries():
            if everywhere or name in self.struck:
                (whole if what == "D" else begun if what == "F" else set[str]()).add(request)
        return begun - whole

    async def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def all_up(self, number: int = 2, *, closed: bool = False) -> None:
        """The first `number` routers see every worker up, and Redis; `closed`: and use them all."""
        end = time.monotonic() + START_S
        for port in self.router_ports[:number]:
            while True:
                with suppress(OSError, ValueError, TimeoutError):
                    shown = (await get(port, "/workers"))["workers"]
                    state = "cygnet:router_state_up 1.0" in await get(port, "/metrics")
                    good = [one for one in shown if one["up"] and one["slot"] >= 0]
                    used = all(one["circuit"] == "closed" for one in shown) or not closed
                    if state and used and len(good) == WORKERS:
                        break
                if time.monotonic() > end:
                    raise SystemExit(f"not all is well again after {self.row.name or 'the start'}")
                await asyncio.sleep(0.1)

    async def load_left(self) -> int:
        """Tokens still booked, once they have had time to go."""
        end = time.monotonic() + 20
        while True:
            with suppress(OSError, ValueError, TimeoutError):
                left = sum(worker["load_tokens"] for worker in (await get(self.router_ports[0], "/workers"))["workers"])
                if not left or time.monotonic() > end:
                    return int(left)
            await asyncio.sleep(0.25)

    def resident(self, name: str = "router-0") -> float:
        """MiB."""
        return float(psutil.Process(self.processes[name].pid).memory_info().rss) / 2**20


Fault = Callable[[Rig], Awaitable[None]]
FAULTS: dict[str, tuple[Fault, Habits, int]] = {}
"""Name -> what happens, what callers do, how many there are."""


def fault(name: str, habits: Habits | None = None, callers: int = 40) -> Callable[[Fault], Fault]:
    def note(what: Fault) -> Fault:
        FAULTS[name] = what, habits or Habits(), callers
        return what

    return note


@fault("worker killed")
async def worker_killed(rig: Rig) -> None:
    await rig.without("worker-1", rig.seconds(1, 4))


@fault("worker hung")
async def worker_hung(rig: Rig) -> None:
    rig.struck.add("worker-1")
    await rig.between("worker-1", signal.SIGSTOP, signal.SIGCONT, rig.seconds(6, 10))


@fault("worker answers garbage")
async def worker_garbage(rig: Rig) -> None:
    await rig.between("worker-1", signal.SIGUSR1, signal.SIGUSR1, rig.seconds(1.5, 5))


@fault("worker breaks off each time")
async def worker_vanishes(rig: Rig) -> None:
    await rig.between("worker-1", signal.SIGUSR2, signal.SIGUSR2, rig.seconds(1.5, 5))


@fault("Redis killed")
async def redis_killed(rig: Rig) -> None:
    await rig.without("redis", rig.seconds(1, 5))


@fault("Redis frozen")
async def redis_frozen(rig: Rig) -> None:
    await rig.between("redis", signal.SIGSTOP, signal.SIGCONT, rig.seconds(1.5, 5))


async def redis_command(rig: Rig, text: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.redis_port)
    writer.write(f"{text}\r\n".encode())
    if not (await reader.readline()).startswith(b"+OK"):
        raise SystemExit(f"Redis does not take {text}")
    writer.close()


@fault("Redis emptied")
async def redis_emptied(rig: Rig) -> None:
    await redis_command(rig, "FLUSHALL")


@fault("script cache flushed")
async def redis_scripts(rig: Rig) -> None:
    for _ in range(3):
        await redis_command(rig, "SCRIPT FLUSH")
        await asyncio.sleep(0.3)


@fault("router killed")
async def router_killed(rig: Rig) -> None:
    await rig.without("router-0", rig.seconds(1, 3))


@fault("router ends by SIGTERM")
async def router_drains(rig: Rig) -> None:
    began = time.monotonic()
    rig.send("router-0", signal.SIGTERM)
    status = await asyncio.wait_for(rig.processes["router-0"].wait(), 60)
    rig.row.notes |= {"drained in s": time.monotonic() - began, "not status 0": status}
    await rig.start("router-0")


@fault("half of the callers leave", Habits(leaves=0.5))
async def callers_leave(rig: Rig) -> None:
    await asyncio.sleep(rig.seconds(3, 20))


@fault("slow readers")
async def slow_readers(rig: Rig) -> None:
    """40 MB each, at 4 KB in 50 ms, beside the usual callers."""
    before = rig.resident()
    slow = Callers(rig.router_ports[:1], "slow", Habits(mock="0 4000 0 10000", pause_s=0.05), seed=1)
    slow.start(30)
    await asyncio.sleep(rig.seconds(3, 15))
    rig.row.notes["router MiB more"] = rig.resident() - before
    rig.row.notes["not bounded"] = float(rig.resident() - before > 200)
    await slow.leave()


async def _send_badly(port: int, head: bytes, filler: bytes, until: float) -> None:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head)
            while time.monotonic() < until and not reader.at_eof():
                writer.write(filler)
                await asyncio.wait_for(writer.drain(), 5)
                await asyncio.sleep(0.001)
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()


@fault("floods and lies")
async def floods(rig: Rig) -> None:
    """Endless headers, trailers and pipelined requests; bodies shorter and longer than they say."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n"
    kinds = (
        (b"GET / HTTP/1.1\r\n", b"A: %b\r\n" % (b"x" * 1000)),
        (post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"T: %b\r\n" % (b"x" * 1000)),
        (post + b"Content-Length: 60000000\r\n\r\n", b"x" * 1000),
        (post + b"Content-Length: 2\r\n\r\n{}", b"rubbish\r\n" * 100),
        (b"", b"GET /health HTTP/1.1\r\n\r\n" * 50),
    )
    before, until = rig.resident(), time.monotonic() + rig.seconds(3, 15)
    port = rig.router_ports[0]
    each = 8 if rig.quick else 20
    await asyncio.gather(*(_send_badly(port, head, filler, until) for head, filler in kinds for _ in range(each)))
    rig.row.notes["router MiB more"] = rig.resident() - before
    rig.row.notes["not bounded"] = float(rig.resident() - before > 300)


@fault("idle connections")
async def idle_connections(rig: Rig) -> None:
    before, number = rig.resident(), 1000 if rig.quick else 10_000
    idle = []
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", rig.router_ports[0])
        idle.append(writer)
    await asyncio.sleep(rig.seconds(1, 5))
    text = await get(rig.router_ports[0], "/metrics")
    held = next(float(line.split()[1]) for line in text.splitlines() if line.startswith("cygnet:router_connections "))
    rig.row.notes |= {"idle": number, "KiB each": (rig.resident() - before) * 1024 / number}
    rig.row.notes["not held"] = max(0.0, number - held)
    for writer in idle:
        writer.transport.abort()


@fault("1,000 streams at once", Habits(mock="50 20 200 20", text=1000), callers=1000)
async def many_streams(rig: Rig) -> None:
    await asyncio.sleep(rig.seconds(4, 120))


async def run_fault(rig: Rig, name: str) -> Row:
    what, habits, number = FAULTS[name]
    if rig.quick:
        number = min(number, 250)
    await rig.all_up()
    rig.row, rig.struck = Row(name), set()
    callers = Callers(rig.router_ports, name.replace(" ", "_"), habits, seed=random.getrandbits(30))
    callers.start(number)
    await asyncio.sleep(rig.seconds(1.5, 4))
    await rig.all_up(1, closed=True)
    at = time.monotonic()
    try:
        await what(rig)
        await asyncio.sleep(rig.seconds(1.5, 5))
    finally:
        await callers.stop()
    await rig.all_up()
    _judge(rig, callers, at)
    rig.row.left = await rig.load_left()
    return rig.row


def _judge(rig: Rig, callers: Callers, at: float) -> None:
    row, entries = rig.row, rig.entries()
    seen = {request for _, what, request in entries if what == "R"}
    done = Counter(request for _, what, request in entries if what == "D")
    whole = [(one.ended, one.ended - one.began) for one in callers.outcomes if one.kind == "ok"]
    usual = [took for ended, took in whole if ended < at] or [took for _, took in whole]
    row.usual_s = statistics.median(usual or [0.0])
    kinds = Counter[str]()
    due = rig.due()
    died = "router-0" in rig.struck
    for one in callers.outcomes:
        kind = one.kind
        if kind == "lost" and row.name.startswith("router ") and one.request not in seen:
            kind = "resent"
        elif kind in ("lost", "broken") and died and one.began < at + 0.5:  # with the router that held it
            kind = "broken"
            due.add(one.request)
        kinds[kind] += 1
        if (
            one.ended >= at
            and kind != "left"
            and (kind not in ("ok", "resent") or one.ended - one.began > row.usual_s + 1)
        ):
            row.felt_s = max(row.felt_s, one.ended - at)
    row.requests = len(callers.outcomes) - kinds["left"]
    row.ok, row.lost, row.wrong, row.broken = kinds["ok"], kinds["lost"], kinds["wrong"], kinds["broken"]
    row.resent = kinds["resent"] + callers.reconnects
    row.refused = sum(kinds[status] for status in REFUSALS)
    row.wrong += sum(number for kind, number in kinds.items() if kind.isdigit() and kind not in REFUSALS)
    row.twice = sum(times > 1 for times in done.values())
    if kinds["left"]:
        row.notes["left by callers"] = kinds["left"]
    row.due = len(due & {one.request for one in callers.outcomes if one.kind != "left"})


def lines(rows: list[Row]) -> list[str]:
    head = f"{'fault':30}{'requests':>9}{'lost':>6}{'twice':>6}{'broken':>7}{'due':>5}{'refused':>8}{'resent':>7}"
    out = [f"{head}{'usual s':>8}{'felt s':>7}{'left':>5}"]
    for row in rows:
        line = f"{row.name:30}{row.requests:>9,}{row.lost:>6}{row.twice:>6}{row.broken:>7}{row.due:>5}{row.refused:>8}"
        notes = ", ".join(f"{name} {value:.3g}" for name, value in row.notes.items() if not name.startswith("not "))
        out.append(f"{line}{row.resent:>7}{row.usual_s:>8.2f}{row.felt_s:>7.1f}{row.left:>5}  {notes}")
    return out


async def measure(names: list[str], quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), quick)
        try:
            parts = ["redis", *(f"worker-{number}" for number in range(WORKERS)), "router-0", "router-1"]
            await rig.start(parts[0])
            await asyncio.gather(*(rig.start(part) for part in parts[1:]))
            rows = []
            print(lines([])[0], flush=True)
            for name in names:
                rows.append(await run_fault(rig, name))
                print(lines(rows[-1:])[1], flush=True)
            return rows
        finally:
            await rig.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, fewer callers")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(FAULTS), help="some of the faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument(
        "--check", action="store_true", help="status 1 if a request was lost, doubled or needlessly broken"
    )
    args = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("needs redis-server on the PATH (Debian: apt-get install redis-server)")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    names = [name for name in FAULTS if not args.only or name in args.only]
    rows = uvloop.run(measure(names, args.quick))
    if args.json:
        report: dict[str, Any] = {"environment": environment(load=os.getloadavg()), "quick": args.quick}
        args.json.write_text(json.dumps(report | {"faults": [asdict(row) for row in rows]}, indent=1))
    missed = [f"MISSED: {row.name}: {', '.join(row.misses)}" for row in rows if row.misses]
    print("\n".join(missed) if missed else "nothing lost, nothing twice, nothing broken that could have been saved")
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
