"""`cygnet plan`: what models cost per token of context, and what fits on which accelerators."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cygnet.sim.model_facts import ModelFacts
    from cygnet.sim.planner import Fit, Plan

GB = 1e9


def plan(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="a name (none: list them), or a config.json")
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="A100, H20, H100, H200, B200")] = "H200",
    context: Annotated[
        str | None, typer.Option(metavar="N", help="tokens of a session, such as 128K [the model's]")
    ] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", help="GPUs per attention rank [by KV heads]")] = None,
    sessions: Annotated[int, typer.Option(metavar="N", help="sessions a rank must hold")] = 1,
    kv_bits: Annotated[int, typer.Option(metavar="N", help="bits of a KV element: 8 or 16")] = 16,
    weight_bits: Annotated[float | None, typer.Option(metavar="N", help="bits of a weight [the checkpoint's]")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw costs: .svg, .png, .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print KV, attention cost, GPUs needed and capacity of models."""
    from dataclasses import replace

    from cygnet.cli.console import print_json, stdout
    from cygnet.sim.hardware import HARDWARE
    from cygnet.sim.planner import PlanSettings
    from cygnet.sim.planner import plan as make_plan

    if kv_bits not in (8, 16):
        raise typer.BadParameter("choose 8 or 16", param_hint="--kv-bits")
    if sessions < 1:
        raise typer.BadParameter("must be 1 or more", param_hint="--sessions")
    if not models:
        _print_known(stdout(), as_json)
        return
    profile = HARDWARE.get(gpu.upper())
    tokens = parse_tokens(context) if context else None
    settings = PlanSettings(context=1, kv_bytes=kv_bits // 8, sessions=sessions)
    plans = []
    for name in models:
        facts = find_facts(name, None if weight_bits is None else weight_bits / 8)
        plans.append(make_plan(facts, profile, replace(settings, context=tokens or facts.max_model_len), tp=tp))
    if plot is not None:
        write_plot(plans, plot)
    if as_json:
        print_json([document(one) for one in plans])
    else:
        for one in plans:
            _print_plan(stdout(), one)


def parse_tokens(text: str) -> int:
    """`8192`, `128K` or `1M` (binary) as tokens."""
    import re

    from cygnet.base.errors import ConfigError

    match = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"can't read {text!r} as a number of tokens; write for example 8192, 128K or 1M")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def find_facts(name: str, weight_bytes: float | None) -> "ModelFacts":
    """Facts of a model of the table, or of the config.json at a path (or in the folder there)."""
    import msgspec

    from cygnet.base.errors import ConfigError
    from cygnet.sim.model_config import facts_from_config
    from cygnet.sim.model_table import model_facts

    path = Path(name)
    if not path.exists():
        return model_facts(name, weight_bytes=weight_bytes)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is not a model's config.json: {error}") from None
    label = file.resolve().parent.name or str(file)
    return facts_from_config(config, name=label, source=str(file), weight_bytes=weight_bytes)


def write_plot(plans: "list[Plan]", file: Path) -> None:
    """Draw the costs of all plans into `file`, whose ending says the format."""
    from cygnet.base.errors import ConfigError
    from cygnet.sim.plots import context_costs

    data = context_costs(plans, file.suffix.removeprefix("."))
    try:
        file.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from None


# ------------------------------------------------------------------- JSON


def document(plan: "Plan") -> dict[str, Any]:
    """A plan as plain data; bytes and tokens are whole numbers."""
    from dataclasses import asdict

    facts, full, swa = plan.model, plan.geometry.full, plan.geometry.swa
    return {
        "model": facts.name,
        "source": facts.source,
        "parameters": facts.num_parameters,
        "active_parameters": facts.num_active_parameters,
        "full_layers": full.num_layers,
        "swa_layers": swa.num_layers,
        "window": plan.geometry.window,
        "full_bytes_per_token": full.token_bytes,
        "swa_bytes_per_token": swa.token_bytes,
        "rebuild_tokens": plan.geometry.rebuild_tokens,
        "gpu": plan.hardware.name,
        "settings": asdict(plan.settings),
        "costs": [{**asdict(cost), "kv_ratio": cost.kv_ratio, "flops_ratio": cost.flops_ratio} for cost in plan.costs],
        "dual_pools": asdict(plan.dual),
        "one_pool": asdict(plan.uniform),
        "host_tokens_per_node": plan.host_tokens,
        "decode_turns": [asdict(turn) for turn in plan.turns],
    }


# ------------------------------------------------------------------ tables


def _print_known(console: "Console", as_json: bool) -> None:
    from rich.table import Table

    from cygnet.cli.console import print_json
    from cygnet.sim.hardware import HARDWARE
    from cygnet.sim.model_table import all_facts

    if as_json:
        print_json(
            {
                "models": {facts.name: facts.source for facts in all_facts()},
                "gpus": {name: HARDWARE.get(name).source for name in HARDWARE},
            }
        )
        return
    table = Table("model", "parameters", "layers full + SWA", "source", box=None, header_style="bold")
    for facts in all_facts():
        layers = f"{facts.full.num_layers} + {facts.swa.num_layers if facts.swa else 0}"
        table.add_row(facts.name, f"{facts.num_parameters / 1e9:.1f} B", layers, facts.source)
    console.print(table)
    console.print(f"\nGPUs: {', '.join(HARDWARE)}. Any other model: the path of its config.json.", markup=False)


def _print_plan(console: "Console", plan: "Plan") -> None:
    facts, geometry = plan.model, plan.geometry
    console.print(f"\n{facts.name}", style="bold", markup=False)
    shape = f"{geometry.full.num_layers} full-attention layers"
    if geometry.has_swa:
        shape += f" + {geometry.swa.num_layers} sliding-window layers (window {geometry.window})"
    active = f", {facts.num_active_parameters / 1e9:.1f} B active" if facts.moe else ""
    lines = [f"{facts.num_parameters / 1e9:.1f} B weights{active}; {shape}", f"facts: {facts.source}"]
    if geometry.has_swa:
        lines.append(
            f"KV per token {geometry.full.token_bytes:,} bytes, and {geometry.swa.token_bytes:,} in the window; "
            f"a lost window is rebuilt from {geometry.rebuild_tokens:,} tokens"
        )
    else:
        lines.append(f"KV per token {geometry.full.token_bytes:,} bytes")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    _print_costs(console, plan)
    _print_fit(console, plan)


def _print_costs(console: "Console", plan: "Plan") -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", title="One sequence", title_justify="left", title_style="dim")
    for name in ("context", "KV GB", "if all full", "ratio", "attention PFLOP", "if all full", "ratio"):
        table.add_column(name, justify="right")
    for cost in plan.costs:
        table.add_row(
            _tokens(cost.tokens),
            _figure(cost.kv_bytes / GB),
            _figure(cost.uniform_kv_bytes / GB),
            f"{cost.kv_ratio:.2f}x",
            _figure(cost.attention_flops / 1e15),
            _figure(cost.full_attention_flops / 1e15),
            f"{cost.flops_ratio:.2f}x",
        )
    console.print(table)


def _print_fit(console: "Console", plan: "Plan") -> None:
    from rich.table import Table

    settings, hardware = plan.settings, plan.hardware
    title = f"{hardware.name}, {settings.sessions} session(s) of {_tokens(settings.context)} tokens per rank"
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="dim")
    table.add_column("")
    columns = [("two pools", plan.dual), ("one pool", plan.uniform)] if plan.geometry.has_swa else [("", plan.dual)]
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, row in _FIT_ROWS:
        table.add_row(label, *(row(fit) if fit.layout else "does not fit" for _, fit in columns))
    console.print(table)
    console.print(f"Host memory of a node holds {plan.host_tokens:,} tokens of context.", markup=False)
    if plan.turns:
        turns = ", ".join(
            f"{turn.batch:,} at {_tokens(turn.context)}" if turn.batch else f"no batch at {_tokens(turn.context)}"
            for turn in plan.turns
        )
        console.print(f"Decoding reads more KV than weights from this batch per rank on: {turns}.", markup=False)


def _layout_text(fit: "Fit") -> str:
    assert fit.layout is not None
    return f"{fit.layout.gpus} (TP {fit.layout.tp}, EP {fit.layout.ep})"


_FIT_ROWS = (
    ("smallest replica, GPUs", _layout_text),
    ("weights per GPU, GB", lambda fit: f"{fit.layout.weight_bytes / GB:.1f}"),
    ("left for KV per GPU, GB", lambda fit: f"{fit.layout.kv_budget / GB:.1f}"),
    ("context held per GPU, tokens", lambda fit: f"{fit.tokens_per_gpu:,}"),
    ("sessions at once per rank", lambda fit: f"{fit.concurrency:,}"),
)


def _figure(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.001 else f"{value:.6f}"


def _tokens(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
