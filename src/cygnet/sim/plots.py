"""Figures as bytes of an image: the caller writes or embeds them. Needs matplotlib, which only this module imports."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cygnet.base.errors import ConfigError
from cygnet.sim.planner import ContextCost, Plan
from cygnet.sim.results import Column, time_per_output_token

FORMATS = ("svg", "png", "pdf")


def load_pyplot() -> Any:
    """matplotlib's pyplot without a display. `ConfigError` says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib; install it with: pip install 'cygnet[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "cygnet"  # the same figure is the same bytes
    return pyplot


def check_format(form: str) -> None:
    """Raise `ConfigError` for a kind of image that isn't drawn."""
    if form not in FORMATS:
        raise ConfigError(f"can't draw {form!r} files; choose one of {', '.join(FORMATS)}")


def image(figure: Any, form: str) -> bytes:
    """The figure as an image of `form`; it is closed."""
    stream = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
    figure.savefig(stream, format=form, metadata=metadata)
    load_pyplot().close(figure)
    return stream.getvalue()


def context_costs(plans: Sequence[Plan], form: str) -> bytes:
    """KV and prefill attention against context, each model beside itself with full attention in every layer."""
    check_format(form)
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _against_context(axes[0], plans, "KV of one sequence (GB)", lambda c: (c.kv_bytes / 1e9, c.uniform_kv_bytes / 1e9))
    _against_context(
        axes[1],
        plans,
        "attention of its prefill (PFLOP)",
        lambda c: (c.attention_flops / 1e15, c.full_attention_flops / 1e15),
    )
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle("Dashed: the same model with full attention in every layer", fontsize=9)
    return image(figure, form)


def _against_context(
    axis: Any, plans: Sequence[Plan], label: str, values: Callable[[ContextCost], tuple[float, float]]
) -> None:
    for index, plan in enumerate(plans):
        tokens = [cost.tokens for cost in plan.costs]
        own, full = zip(*(values(cost) for cost in plan.costs), strict=True)
        colour = f"C{index}"
        axis.plot(tokens, own, color=colour, label=plan.model.name)
        if plan.model.swa or plan.model.full.index:
            axis.plot(tokens, full, color=colour, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(
        lambda tokens, _: f"{tokens / 1024:g}K" if tokens < 1 << 20 else f"{tokens / (1 << 20):g}M"
    )
    axis.set_yscale("log")
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def latencies(columns: dict[str, Column], form: str) -> bytes:
    """Which part of the requests had their first token, their tokens, and their hand-over if any, within a time."""
    check_format(form)
    pyplot = load_pyplot()
    from matplotlib import ticker

    shown = {
        "time to first token (s)": (columns["first_ns"] - columns["arrival_ns"]) / 1e9,
        "time per token (ms)": time_per_output_token(columns) / 1e6,
    }
    if columns["handover_ns"].any():
        shown["from prefill to decode worker (ms)"] = columns["handover_ns"][columns["output_tokens"] > 1] / 1e6
    figure, axes = pyplot.subplots(1, len(shown), figsize=(11, 3.6), layout="constrained")
    for axis, (label, values) in zip(axes, shown.items(), strict=True):
        axis.ecdf(np.maximum(values, 1e-6))
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel(label)
        axis.set_ylabel("part of the requests within it")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    return image(figure, form)


def _origins(columns: dict[str, Column]) -> dict[str, Column]:
    """Prompt tokens of each request by where their KV came from; host and store where anything did."""
    cached, host, store = columns["cached_tokens"], columns["host_tokens"], columns["store_tokens"]
    if not host.any() and not store.any():
        return {"from the cache": cached, "computed": columns["prompt_tokens"] - cached}
    lower = {name: tokens for name, tokens in (("host", host), ("store", store)) if tokens.any()}
    return {"device": cached - host - store, **lower, "computed": columns["prompt_tokens"] - cached}


def over_time(columns: dict[str, Column], form: str, *, bins: int = 60) -> bytes:
    """Prompt tokens per second of arrivals, split by where they came from; median and 90th percentile of TTFT."""
    check_format(form)
    pyplot = load_pyplot()
    arrival = columns["arrival_ns"] / 1e9
    edges = np.linspace(arrival.min(), max(arrival.max(), arrival.min() + 1e-3), bins + 1)
    width = edges[1] - edges[0]
    origins = {name: np.histogram(arrival, edges, weights=tokens)[0] for name, tokens in _origins(columns).items()}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    axes[0].stackplot(edges[:-1], [tokens / width for tokens in origins.values()], labels=list(origins), step="post")
    axes[0].set_ylabel("prompt tokens per second")
    axes[0].yaxis.set_major_formatter("{x:,.0f}")
    axes[0].legend(fontsize=8, frameon=False)
    ttft = (columns["first_ns"] - columns["arrival_ns"]) / 1e9
    place = np.clip(np.digitize(arrival, edges) - 1, 0, bins - 1)
    filled = [index for index in range(bins) if (place == index).any()]
    for percent, label in ((50, "P50"), (90, "P90")):
        axes[1].plot(edges[filled], [np.percentile(ttft[place == index], percent) for index in filled], label=label)
    axes[1].set_ylabel("time to first token (s)")
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.set_xlabel("arrival (s)")
        axis.grid(alpha=0.3)
    return image(figure, form)
