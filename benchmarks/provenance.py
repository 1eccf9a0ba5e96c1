"""Where a benchmark's figures come from."""

import os
import platform
import subprocess
from pathlib import Path


def environment(**more: object) -> dict[str, object]:
    """Commit, interpreter and machine, and what the caller adds; goes into every JSON report."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    return {
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        **more,
    }
