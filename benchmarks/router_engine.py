"""What cache-aware routing does with the real engine: sessions of growing prompts over `cygnet up` with two servers, by
policy. Prints hits, input throughput and time to the first token.

    python benchmarks/router_engine.py [--quick] [--model gemma3-270m] [--policies NAME ...] [--seed N] [--json FILE]
"""

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cygnet.cli.fleet import cygnet_command
from provenance import environment

WORDS = re.findall(
    r"\w+",
    """river stone market window paper garden letter engine winter signal harbour copper lantern village thunder orchard
    mirror ladder pocket ribbon saddle tunnel valley whistle anchor basket candle dragon emerald feather""",
)
START_S = 240.0


@dataclass
class Run:
    """What one policy's requests came to."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.first_s)
        return {
            "requests": len(ordered),
            "hit": self.cached_tokens / self.prompt_tokens,
            "input_tokens_per_s": self.prompt_tokens / self.seconds,
            "ttft_p50_s": ordered[len(ordered) // 2],
            "ttft_p90_s": ordered[int(len(ordered) * 0.9)],
        }


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


async def turn(http: httpx.AsyncClient, model: str, prompt: str, run: Run) -> str:
    """One streamed request; its answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    said, began, first = "", time.perf_counter(), 0.0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or time.perf_counter() - began
            event = json.loads(line[6:])
            said += "".join(choice["text"] for choice in event["choices"])
            if usage := event.get("usage"):
                run.prompt_tokens += usage["prompt_tokens"]
                run.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    run.first_s.append(first)
    return said


async def drive(url: str, sessions: int, turns: int, callers: int, seed: int) -> Run:
    """All sessions, `callers` at a time, each turn after the answer to the last one."""
    run, seats = Run(), asyncio.Semaphore(callers)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def session(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            prompt = text(rng, 300)
            for _ in range(turns):
                async with seats:
                    prompt += await turn(http, model, prompt, run)
                prompt += "\n" + text(rng, 60)

        began = time.perf_counter()
        await asyncio.gather(*(session(number) for number in range(sessions)))
        run.seconds = time.perf_counter() - began
    return run


async def measure(model: str, policy: str, sessions: int, turns: int, seed: int) -> dict[str, float]:
    """Figures of a fleet of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = cygnet_command("up", model, "--workers", "2", "--port", "0", "--status-port", "0", "--log", str(log))
        process = await asyncio.create_subprocess_exec(*command, "--policy", policy)
        try:
            end = time.monotonic() + START_S
            while not (ready := re.search(r"ready: (http://\S+)/v1", log.read_text() if log.exists() else "")):
                if process.returncode is not None or time.monotonic() > end:
                    raise SystemExit(f"the fleet does not start:\n{log.read_text()}")
                await asyncio.sleep(0.2)
            return (await drive(ready[1], sessions, turns, callers=4, seed=seed)).figures()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sessions")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--policies", nargs="+", default=["round_robin", "least_loaded", "cache_aware"])
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    args = parser.parse_args()
    sessions, turns = (7, 4) if args.quick else (15, 6)
    report: dict[str, Any] = {"environment": environment(), "sessions": sessions, "turns": turns, "seed": args.seed}
    report["policies"] = {}
    print(f"{'policy':14}{'hit':>8}{'input tok/s':>13}{'TTFT p50 s':>12}{'p90 s':>8}")
    for policy in args.policies:
        one = report["policies"][policy] = asyncio.run(measure(args.model, policy, sessions, turns, args.seed))
        print(
            f"{policy:14}{one['hit']:>8.1%}{one['input_tokens_per_s']:>13,.0f}{one['ttft_p50_s']:>12.2f}"
            f"{one['ttft_p90_s']:>8.2f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
