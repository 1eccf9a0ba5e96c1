"""Where Cygnet keeps what it can make again: assembled weights and built tokenizers."""

import os
from pathlib import Path

from cygnet.model.bounded_folder import BoundedFolder


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cygnet`, by default `~/.cache/cygnet`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "cygnet"


def weights_folder(cache_dir: Path, *, limit: int | None = None) -> BoundedFolder:
    """The part of `cache_dir` that holds assembled weights."""
    return BoundedFolder(cache_dir / "weights", suffix=".safetensors", limit=limit)
