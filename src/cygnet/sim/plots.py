"""Figures as bytes of an image: the caller writes or embeds them. Needs matplotlib, which only this module imports."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from cygnet.base.errors import ConfigError
from cygnet.sim.planner import ContextCost, Plan

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
