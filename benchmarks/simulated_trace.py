"""A trace through the real engine on this machine, beside what the simulator says of it.

    python benchmarks/simulated_trace.py PROFILE TRACE [--limit 60] [--rate 1.0] [--max-input 1500] [--max-output 48]
                                         [--model gemma3-270m] [--facts gemma-3-270m] [--json FILE]

PROFILE is a file of `cygnet bench calibrate`, made on this machine when it was as quiet. Prompts keep their beginnings
and lose their ends beyond `--max-input`; requests come at `--rate` per second (Poisson). Both sides have the same
requests, pools and limits: the engine in this process, without HTTP, with random tokens of the same sharing.
"""

import argparse
import heapq
import json
import time
from itertools import count
from pathlib import Path

import msgspec

from cygnet.base.config import resolve
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.cli.bench.calibrate import read_profile
from cygnet.cli.bench.traces import load_trace
from cygnet.cli.bench.workload import TokenSource
from cygnet.cli.plan import find_facts
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import load_engine
from cygnet.sim.assembly import build
from cygnet.sim.comparison import measures
from cygnet.sim.results import SUMMED, Cached, Recorder, Results, summarize
from cygnet.sim.scenario import parse_scenario
from cygnet.sim.sessions import Session, limited, with_poisson_arrivals
from provenance import environment

SETS = ["kv.memory=1GiB", "kv.host_cache=off", "engine.audit=off"]
SHOWN = (
    "requests per second", "input tokens per second", "output tokens per second", "effective hit, %", "workers busy, %",
    "TTFT mean, ms", "TTFT P50, ms", "TTFT P90, ms", "TPOT mean, ms", "TPOT P50, ms", "TPOT P90, ms", "E2E mean, ms",
)  # fmt: skip


class Sent:
    """A request on its way through the real engine."""

    def __init__(self, session: int, turn: int, due_ns: int, prompt: list[int]) -> None:
        self.session, self.turn, self.due_ns, self.prompt = session, turn, due_ns, prompt
        self.said: list[int] = []
        self.first_ns = self.queued_ns = self.cached = 0


def run_live(engine: LocalEngine, sessions: list[Session]) -> Results:
    """Send the sessions at their times; each turn after its predecessor's answer and pause."""
    tokens, order, recorder = TokenSource(0, 200_000), count(), Recorder()
    sent: dict[str, Sent] = {}
    before: dict[int, list[int]] = {}
    warm = engine.core.stats()
    busy_ns, start_ns = 0, time.monotonic_ns()
    due = [(start_ns + round((s.arrival_s or 0.0) * 1e9), next(order), i, 0) for i, s in enumerate(sessions)]
    heapq.heapify(due)
    while due or engine.busy:
        now_ns = time.monotonic_ns()
        while due and due[0][0] <= now_ns:
            due_ns, number, index, place = heapq.heappop(due)
            turn = sessions[index].turns[place]
            prompt = before.get(index, []) + [token + 10 for token in tokens.token_ids(turn.pieces)]
            sent[str(number)] = Sent(index, place, due_ns, prompt)
            params = SamplingParams(temperature=0.0, max_tokens=turn.output_len, ignore_eos=True)
            engine.add(AddRequest(str(number), prompt, params, arrival_ns=due_ns))
        if not engine.busy:
            time.sleep(max(0.0, (due[0][0] - time.monotonic_ns()) / 1e9))
            continue
        outputs = engine.step()
        end_ns = time.monotonic_ns()
        busy_ns += end_ns - now_ns
        for output in outputs:
            one = sent[output.request_id]
            one.said += output.token_ids
            if not one.first_ns:
                one.first_ns, one.queued_ns, one.cached = end_ns, output.queued_ns, output.num_cached_tokens
            if output.finish_reason is None:
                continue
            del sent[output.request_id]
            times = (one.due_ns, one.queued_ns, one.first_ns, end_ns)
            recorder.record(*times, len(one.prompt), len(one.said), Cached(one.cached))
            session = sessions[one.session]
            before[one.session] = one.prompt + one.said if session.growing else []
            if one.turn + 1 < len(session.turns):
                pause_ns = round(session.turns[one.turn + 1].delay_s * 1e9)
                heapq.heappush(due, (end_ns + pause_ns, next(order), one.session, one.turn + 1))
    stats = engine.core.stats()
    counted = {name: getattr(stats, name) - getattr(warm, name) for name in SUMMED}
    return summarize(recorder.columns(), [msgspec.structs.replace(stats, **counted)], refused={}, busy_ns=[busy_ns])


def warm_up(engine: LocalEngine) -> None:
    """Compile what is compiled at its first use."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.generate([[7] * 700, [8] * 300], params)
    engine.flush_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--max-input", type=int, default=1500)
    parser.add_argument("--max-output", type=int, default=48)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--facts", default="gemma-3-270m")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    caps = {"max_input": args.max_input, "max_output": args.max_output, "max_total": None}
    sessions, _ = limited(load_trace(args.trace, args.limit), **caps)
    sessions = with_poisson_arrivals(sessions, args.rate, seed=0)
    config = resolve(sets=[*SETS, f"model.model={args.model}"]).config
    engine, _ = load_engine(config)
    warm_up(engine)
    measured = run_live(engine, sessions)
    profile, facts = read_profile(args.profile), find_facts(args.facts, None)
    bits = 8 * engine.core.kv.geometry.full.dtype_bytes
    scenario = parse_scenario(f"[model]\nkv_bits = {bits}\n", "trace")
    scenario = msgspec.structs.replace(scenario, kv=config.kv, engine=config.engine)
    predicted = build(scenario, facts, hardware=profile, sizes=engine.core.kv.sizes).run(sessions)
    engine.close()
    rows = {name: (measures(measured)[name], measures(predicted)[name]) for name in SHOWN}
    print(f"{measured.finished} requests\n")
    print(f"{'':28}{'measured':>12}{'predicted':>12}{'off':>8}")
    for name, (real, said) in rows.items():
        print(f"{name:28}{real:12,.1f}{said:12,.1f}{100 * (said / real - 1) if real else 0.0:+7.0f} %")
    if args.json:
        document = {"environment": environment(profile=str(args.profile), trace=args.trace.name), "results": rows}
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
