"""Where Cygnet keeps what it can make again: assembled weights and built tokenizers."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cygnet`, by default `~/.cache/cygnet`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "cygnet"
