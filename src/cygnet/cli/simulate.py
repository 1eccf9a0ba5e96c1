"""`cygnet simulate`: what a fleet would do with a workload, by the engine's own code in simulated time."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cygnet.sim.report import Ran


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="TOML file; docs/simulator.md")],
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="ask this trace instead")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="any of its settings; repeatable")
    ] = None,
    compare: Annotated[Path | None, typer.Option(metavar="FILE", help="a scenario to run beside it")] = None,
    sweep: Annotated[
        str,
        typer.Option(metavar="A.B=C,D,...", help="run it with each of these values, side by side", show_default=False),
    ] = "",
    seeds: Annotated[int, typer.Option(metavar="N", help="runs, each with the next seed")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all numbers there")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write a row per request there")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a report with plots there")
    ] = None,
) -> None:
    """Simulate a fleet: hit rates, latencies, throughput of a workload.

    The scheduler and the cache are the engine's own; steps take what a cost model says. The same seed gives the same
    result.
    """
    from cygnet.cli.console import stdout
    from cygnet.sim.plots import load_pyplot

    if seeds < 1:
        raise typer.BadParameter("must be 1 or more", param_hint="--seeds")
    if html_file is not None:
        load_pyplot()  # what is missing is better said before than after
    rans = [
        run_scenario(file, trace, sets or [], seeds, value)
        for file in (scenario, compare)
        if file is not None
        for value in _swept(sweep)
    ]
    print_results(stdout(), rans)
    if json_file is not None:
        _write(json_file, _json(rans))
    if csv_file is not None:
        _write(csv_file, _csv(rans))
    if html_file is not None:
        from cygnet.sim.report import html

        _write(html_file, html(rans, notes=[_note(rans)]).encode())


def _swept(sweep: str) -> list[str]:
    """`a.b=1,2` as one setting per run; no sweep is one run with none. Commas within brackets do not part values."""
    import re

    from cygnet.base.errors import ConfigError

    if not sweep:
        return [""]
    path, eq, values = sweep.partition("=")
    if not eq or not values:
        raise ConfigError(f"--sweep {sweep!r} needs the form path=value,value, for example store.ttl_s=60,600,3600")
    return [f"{path}={value}" for value in re.split(r",(?![^\[]*\])", values)]


def run_scenario(file: Path, trace: Path | None, sets: list[str], seeds: int, swept: str = "") -> "Ran":
    """Run the scenario of a file once per seed, with a progress bar. `swept` is one more setting, and in its name."""
    import msgspec

    from cygnet.base.errors import ConfigError
    from cygnet.cli.bench.calibrate import read_profile
    from cygnet.cli.bench.traces import load_trace
    from cygnet.cli.plan import find_facts
    from cygnet.sim.assembly import build
    from cygnet.sim.hardware import HARDWARE
    from cygnet.sim.report import Ran
    from cygnet.sim.scenario import parse_scenario
    from cygnet.sim.workload import workload

    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read scenario {file}: {error}") from None
    scenario = parse_scenario(text, str(file), [*sets, *([swept] if swept else [])])
    facts = find_facts(_beside(file, scenario.model.name), scenario.model.weight_bits / 8 or None)
    gpu = scenario.fleet.gpu
    hardware = read_profile(Path(_beside(file, gpu))) if gpu.endswith(".json") else HARDWARE.get(gpu)
    path = trace or (file.parent / scenario.workload.trace if scenario.workload.trace else None)
    sessions = load_trace(path, scenario.workload.limit or None) if path else None
    runs, columns = [], None
    for seed in range(scenario.seed, scenario.seed + seeds):
        seeded = msgspec.structs.replace(scenario, seed=seed)
        asked = workload(seeded, sessions)
        with Bar(file.stem, asked.num_requests) as bar, rare_collections():
            simulation = build(seeded, facts, hardware=hardware, progress=bar.update)
            runs.append(simulation.run(asked.sessions))
        if columns is None:
            columns = simulation.recorder.columns()
    assert columns is not None
    return Ran(f"{file.stem} {swept}".rstrip(), scenario, tuple(runs), columns, hardware.calibration)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles seldom, and not in what is there already: a simulation holds millions of objects and
    makes few cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _beside(file: Path, name: str) -> str:
    """A model's path is relative to the scenario; a model's name stays as it is."""
    path = file.parent / name
    return str(path) if path.exists() else name


# ------------------------------------------------------------------ output


def print_results(console: Any, rans: "list[Ran]") -> None:
    """A measure per line, a column per scenario."""
    from rich.table import Table

    from cygnet.sim.comparison import estimates
    from cygnet.sim.report import figure

    table = Table(box=None, header_style="bold")
    table.add_column("")
    for ran in rans:
        table.add_column(ran.name, justify="right")
    columns = [estimates(ran.runs) for ran in rans]
    for name in columns[0]:
        if all(name in column for column in columns):
            table.add_row(name, *(figure(column[name]) for column in columns))
    console.print(table)
    console.print(_note(rans), markup=False, soft_wrap=True)


def _note(rans: "list[Ran]") -> str:
    first = rans[0].runs[0]
    refused = ", ".join(f"{count} {reason}" for reason, count in first.refused.items())
    return (
        f"{first.finished:,} requests in {first.duration_s:,.1f} simulated seconds"
        + (f" (refused: {refused})" if refused else "")
        + f"; step times are {'; '.join(dict.fromkeys(_times_of(ran) for ran in rans))}"
    )


def _times_of(ran: "Ran") -> str:
    found = ran.calibration
    if found is None:
        return "a roofline with assumed efficiencies, not measured"
    return (
        f"a roofline fitted to {found.num_samples} kinds of steps of {found.model} on {found.machine}, off by "
        f"{100 * found.median_error:.0f} % in the median and {100 * found.p90_error:.0f} % at P90 when left out"
    )


def _json(rans: "list[Ran]") -> bytes:
    import msgspec

    from cygnet.version import __version__

    runs = [{"name": ran.name, "scenario": ran.scenario, "runs": ran.runs} for ran in rans]
    return msgspec.json.format(msgspec.json.encode({"cygnet": __version__, "scenarios": runs}), indent=1)


def _csv(rans: "list[Ran]") -> bytes:
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(("scenario", *rans[0].columns))
    for ran in rans:
        for row in zip(*(column.tolist() for column in ran.columns.values()), strict=True):
            writer.writerow((ran.name, *row))
    return stream.getvalue().encode()


def _write(file: Path, data: bytes) -> None:
    from cygnet.base.errors import ConfigError

    try:
        file.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from None


class Bar:
    """Progress on stderr, drawn now and then as requests end."""

    _REDRAW_S = 0.2

    def __init__(self, name: str, num_requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from cygnet.cli.console import stderr

        self._progress = Progress(
            TextColumn(name),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=stderr(),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_requests)
        self._drawn_s = 0.0
        self._clock: Callable[[], float]

    def __enter__(self) -> "Bar":
        import time

        self._clock = time.monotonic
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, done: int) -> None:
        """So many requests have ended."""
        if done % 64 == 0 and self._clock() - self._drawn_s >= self._REDRAW_S:
            self._drawn_s = self._clock()
            self._progress.update(self._task, completed=done)
            self._progress.refresh()
