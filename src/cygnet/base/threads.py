"""How many CPUs this process may really use."""

import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs by affinity and by the cgroup's quota (v2), at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(cpus, int(quota))) if quota else cpus


def cgroup_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """CPUs granted by the cgroup, or `None` without a limit."""
    try:
        limit, period = path.read_text().split()[:2]
        return int(limit) / int(period)
    except (OSError, ValueError):
        return None
