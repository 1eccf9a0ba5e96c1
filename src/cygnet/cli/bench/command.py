"""`cygnet bench serve`: measure a running OpenAI-compatible server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cygnet.cli.bench.calibrate import calibrate

if TYPE_CHECKING:
    from cygnet.cli.bench.client import Client, Result
    from cygnet.cli.bench.load import Form
    from cygnet.cli.bench.stats import Summary
    from cygnet.sim.sessions import Session

bench_app = typer.Typer(help="Measure a server.", no_args_is_help=True, rich_markup_mode=None)

DEFAULT_CONCURRENCY = 16


def _option(metavar: str, text: str, envvar: str | None = None) -> Any:
    """An option whose default, when it matters, stands in its text: shorter than what typer appends."""
    return typer.Option(metavar=metavar, help=text, envvar=envvar, show_envvar=False, show_default=False)


@bench_app.callback()
def bench() -> None:
    """Measure a server."""


bench_app.command("calibrate")(calibrate)


@bench_app.command("serve")
def serve(
    url: Annotated[str, _option("URL", "server [http://127.0.0.1:8000]")] = "http://127.0.0.1:8000",
    model: Annotated[str, _option("NAME", "model to ask [the server's first]")] = "",
    endpoint: Annotated[str, _option("KIND", "completions or chat [completions]")] = "completions",
    num_prompts: Annotated[int, _option("N", "sessions; of one request each, unless --turns [100]")] = 100,
    turns: Annotated[
        int | None, _option("N", "requests per session, each repeats all before it [1]; a trace's cap")
    ] = None,
    input_len: Annotated[int | None, _option("N", "new tokens per request [256]; a trace's cap")] = None,
    output_len: Annotated[int | None, _option("N", "tokens to generate [64]; a trace's cap")] = None,
    shared_prefix_len: Annotated[int, _option("N", "first tokens, equal in all sessions [0]")] = 0,
    concurrency: Annotated[int | None, _option("N", "sessions at once [16]")] = None,
    rate: Annotated[float | None, _option("R", "sessions started per second, Poisson")] = None,
    trace: Annotated[Path | None, _option("FILE", "replay a trace (.jsonl, .csv, .gz)")] = None,
    trace_speed: Annotated[float, _option("X", "replay times and pauses so much faster [1]")] = 1.0,
    temperature: Annotated[float, _option("T", "sampling temperature [0]")] = 0.0,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="let answers end before --output-len")] = False,
    vocab_size: Annotated[int, _option("N", "random token ids stay below this [30000]")] = 30_000,
    seed: Annotated[int, _option("N", "same seed, same requests [0]")] = 0,
    timeout: Annotated[float, _option("S", "seconds per request [600]")] = 600.0,
    api_key: Annotated[str, _option("KEY", "or CYGNET_API_KEY", envvar="CYGNET_API_KEY")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all numbers there")] = None,
) -> None:
    """Send load to a server; print latencies, throughput, cache hits.

    Without --rate and --concurrency, 16 sessions run at once; a trace with times is replayed at those times.
    """
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in locals().items()}
    settings.pop("api_key")
    _check(settings)
    sessions = _sessions(settings)
    if concurrency is None and rate is None and any(session.arrival_s is None for session in sessions):
        settings["concurrency"] = DEFAULT_CONCURRENCY
    _run(settings, sessions, api_key, json_file)


def _check(settings: dict[str, Any]) -> None:
    if settings["endpoint"] not in ("completions", "chat"):
        raise typer.BadParameter("choose completions or chat", param_hint="--endpoint")
    for name in ("num_prompts", "turns", "input_len", "output_len", "concurrency", "rate", "trace_speed", "timeout"):
        if settings[name] is not None and settings[name] <= 0:
            raise typer.BadParameter("must be above 0", param_hint="--" + name.replace("_", "-"))
    for name in ("shared_prefix_len", "temperature", "seed"):
        if settings[name] < 0:
            raise typer.BadParameter("must not be negative", param_hint="--" + name.replace("_", "-"))
    if settings["vocab_size"] <= 1000:
        raise typer.BadParameter("must be above 1000: lower ids are special in many models", param_hint="--vocab-size")


def _sessions(settings: dict[str, Any]) -> list["Session"]:
    """What to ask, with arrival times where the run is an open loop."""
    from dataclasses import replace

    from cygnet.cli.bench.traces import load_trace
    from cygnet.sim.sessions import random_sessions, sped_up, with_poisson_arrivals

    if settings["trace"]:
        sessions = load_trace(Path(settings["trace"]), settings["num_prompts"])
        if settings["rate"] or settings["concurrency"]:
            sessions = [replace(session, arrival_s=None) for session in sessions]
        sessions = [sped_up(session, settings["trace_speed"]) for session in sessions]
        if settings["turns"]:
            sessions = [replace(session, turns=session.turns[: settings["turns"]]) for session in sessions]
    else:
        settings["input_len"] = settings["input_len"] or 256
        settings["output_len"] = settings["output_len"] or 64
        settings["turns"] = settings["turns"] or 1
        sessions = random_sessions(
            num_sessions=settings["num_prompts"],
            turns=settings["turns"],
            input_len=settings["input_len"],
            output_len=settings["output_len"],
            shared_prefix_len=settings["shared_prefix_len"],
        )
    if settings["rate"]:
        sessions = with_poisson_arrivals(sessions, settings["rate"], settings["seed"])
    return sessions


def _run(settings: dict[str, Any], sessions: list["Session"], api_key: str, json_file: Path | None) -> None:
    import asyncio

    from cygnet.cli.bench.report import print_report, write_json
    from cygnet.cli.console import stdout

    run = _measure(settings, sessions, api_key)
    try:
        import uvloop

        summary, counters, results = uvloop.run(run)
    except ImportError:
        summary, counters, results = asyncio.run(run)
    print_report(stdout(), summary, settings, counters)
    if json_file is not None:
        write_json(json_file, summary, settings, counters, results)
    if not summary.completed:
        raise typer.Exit(1)


async def _measure(
    settings: dict[str, Any], sessions: list["Session"], api_key: str
) -> tuple["Summary", dict[str, float], list["Result"]]:
    from cygnet.base.errors import ConfigError
    from cygnet.cli.bench.client import Client
    from cygnet.cli.bench.connection import Connections
    from cygnet.cli.bench.load import probe, run_sessions
    from cygnet.cli.bench.stats import metrics_delta, summarize
    from cygnet.cli.bench.workload import TokenSource
    from cygnet.sim.sessions import limited

    try:
        connections = Connections(settings["url"], api_key)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    client = Client(
        connections,
        endpoint=settings["endpoint"],
        temperature=settings["temperature"],
        ignore_eos=not settings["stop_at_eos"],
        timeout_s=settings["timeout"],
    )
    try:
        longest = await client.find_model(settings["model"])
        settings["model"] = client.model
        caps = {"max_input": settings["input_len"], "max_output": settings["output_len"]} if settings["trace"] else {}
        sessions, shortened = limited(sessions, **{"max_input": None, "max_output": None, **caps}, max_total=longest)
        form = await probe(client, growing=any(session.growing for session in sessions))
        _announce(client, form, sessions, shortened, longest)
        tokens = TokenSource(settings["seed"], settings["vocab_size"])
        before = await _counters(client)
        with _Bar(sum(len(session.turns) for session in sessions)) as bar:
            results, duration_s = await run_sessions(
                client, sessions, tokens, form, concurrency=settings["concurrency"], progress=bar.advance
            )
        counters = metrics_delta(before, await _counters(client))
    finally:
        connections.close()
    return summarize(results, duration_s), counters, results


async def _counters(client: "Client") -> dict[str, float]:
    """The server's own counters; none where it has no `/metrics`."""
    from cygnet.cli.bench.connection import ConnectionFailed
    from cygnet.cli.bench.stats import parse_metrics

    try:
        status, body = await client.connections.fetch("GET", "/metrics")
    except ConnectionFailed:
        return {}
    return parse_metrics(body.decode(errors="replace")) if status == 200 else {}


def _announce(client: "Client", form: "Form", sessions: list["Session"], shortened: int, longest: int | None) -> None:
    from cygnet.cli.console import print_note, stderr

    kinds = {"tokens": "random token ids", "text": "text", "chat": "chat messages"}
    texts = any(turn.text is not None for session in sessions for turn in session.turns)
    num_requests = sum(len(session.turns) for session in sessions)
    what = kinds["text"] if texts and form.kind == "tokens" else kinds[form.kind]
    stderr().print(
        f"{num_requests} requests in {len(sessions)} sessions to {client.model}, prompts as {what}", markup=False
    )
    if shortened:
        limit = f" (the model's {longest} tokens, or the caps given)" if longest else ""
        print_note(f"{shortened} requests are longer than the limits{limit} and were shortened")


class _Bar:
    """Progress on stderr, redrawn as requests end and not by a thread of its own, which would disturb the timing."""

    _REDRAW_S = 0.2

    def __init__(self, num_requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from cygnet.cli.console import stderr

        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]}", style="red"),
            console=stderr(),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_requests, failed="")
        self._failed = 0
        self._drawn_s = 0.0

    def __enter__(self) -> "_Bar":
        self._progress.start()
        self._progress.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, result: "Result") -> None:
        """One more request has ended."""
        self._failed += bool(result.error)
        failed = f"{self._failed} failed" if self._failed else ""
        ended_s = result.sent_s + result.latency
        self._progress.update(self._task, advance=1, failed=failed)
        if ended_s - self._drawn_s >= self._REDRAW_S:
            self._drawn_s = ended_s
            self._progress.refresh()
