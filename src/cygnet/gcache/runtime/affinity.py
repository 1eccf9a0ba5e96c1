"""Which CPUs to run on: by number, beside a NUMA node's memory, or beside a network card.

    0-3,8        these
    node:1       those of NUMA node 1
    nic:eth0     those of the node that eth0 is plugged into

A thread's new memory is taken from the node that it runs on. So a server that is told to keep to a node has its arena,
whose pages its first thread touches, in that node's memory.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cygnet.base.errors import ConfigError

SYS = Path("/sys")


def parse_cpus(text: str, sys_folder: Path = SYS) -> frozenset[int]:
    """The CPUs that `text` means. Raises `ConfigError`."""
    kind, _, name = text.rpartition(":")
    if kind == "node" and name.isdigit():
        where = sys_folder / f"devices/system/node/node{name}/cpulist"
    elif kind == "nic" and re.fullmatch(r"[^/\s]+", name) and name not in (".", ".."):
        where = sys_folder / f"class/net/{name}/device/local_cpulist"
    elif kind:
        raise ConfigError(f"CPUs {text!r}: write for example 0-3,8 or node:1 or nic:eth0")
    else:
        return _listed(text)
    try:
        return _listed(where.read_text().strip())
    except OSError:
        raise ConfigError(f"CPUs {text!r}: this machine does not say which they are ({where} can't be read)") from None


def keep_to(text: str) -> None:
    """Have this thread, and those it starts, run there only. Raises `ConfigError`."""
    cpus = parse_cpus(text)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        may = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"CPUs {text!r}: {error.strerror}; this process may run on {may}") from None


def keep_threads_to(text: str) -> Callable[[], None]:
    """What a thread calls to run there only. Raises `ConfigError` now, for CPUs that this process may not use."""
    cpus = parse_cpus(text)
    may = os.sched_getaffinity(0)
    if not cpus & may:
        raise ConfigError(f"CPUs {text!r}: this process may run on {','.join(map(str, sorted(may)))}")
    return partial(os.sched_setaffinity, 0, cpus & may)


def _listed(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"CPUs {text!r}: {part!r} is no number and no range; write for example 0-3,8")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)
