"""From what a user types to a model's files: built-in name, GGUF file, Hugging Face folder or hub id.

Imports torch only when a checkpoint is opened, so that an API process can have the tokenizer alone.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from cygnet.base.errors import ModelLoadError
from cygnet.model.builtin import BuiltinModel, builtin_models
from cygnet.model.cache_dir import default_cache_dir
from cygnet.model.gguf_file import GgufFile
from cygnet.model.hub import download_snapshot
from cygnet.model.tokenizer import Tokenizer
from cygnet.model.tokenizer_gguf import load_gguf_tokenizer
from cygnet.model.tokenizer_hf import chat_templates, load_hf_tokenizer

if TYPE_CHECKING:
    import torch

    from cygnet.model.checkpoint import Checkpoint

DEFAULT_MODEL = "gemma3-270m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, its files on this machine.

    `name` is what was asked for, `display_name` the id to serve it under, `path` a GGUF file or a Hugging Face folder.
    `is_chat` says whether the model was made for chat, as far as its files tell (a chat template of its own); `note`
    and `licence` are for people and may be empty.
    """

    name: str
    display_name: str
    path: Path
    is_chat: bool
    note: str = ""
    licence: str = ""
    cache_dir: Path | None = None

    def checkpoint(self, *, dtype: "torch.dtype | None" = None) -> "Checkpoint":
        """Open the weights. `dtype` (bf16 or fp32) is that of the tensors; `None`: as stored, fp32 for a GGUF file.

        Raises `ModelLoadError` for files that are damaged or of an unsupported kind.
        """
        import torch

        if self.path.is_dir():
            from cygnet.model.hf_checkpoint import HfCheckpoint

            return HfCheckpoint(self.path, dtype=dtype)
        from cygnet.model.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(self.path, dtype=dtype or torch.float32)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises `ModelLoadError` if it is missing or of an unsupported kind."""
        if self.path.is_dir():
            return load_hf_tokenizer(self.path)
        return load_gguf_tokenizer(self.path, cache_dir=self.cache_dir)


def find_model(
    name: str = DEFAULT_MODEL,
    *,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelSource:
    """Find the model `name`: a built-in name, a .gguf file, a Hugging Face folder, or a hub id `org/name`.

    A folder or file that exists goes before a hub id. A hub id is downloaded into the hub's own cache (`HF_HOME`);
    `HF_HUB_OFFLINE` is respected. `cache_dir` (default `$XDG_CACHE_HOME/cygnet`) holds what Cygnet makes: assembled
    weights, built tokenizers. `progress` is told, in a line of text, of work that takes long.
    Raises `ModelLoadError`, which says what is accepted, if there is no such model.
    """
    name = name.strip() or DEFAULT_MODEL
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    builtins = builtin_models()
    if name in builtins:
        return _builtin(name, builtins.get(name), cache)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path, cache)
    if path.is_file():
        return _from_file(name, path, cache)
    if not _looks_like_path(name) and _HUB_ID.fullmatch(name):
        if progress is not None:
            progress(f"fetching {name} from the Hugging Face hub")
        return _from_folder(name, download_snapshot(name), cache, display_name=name)
    raise _not_found(name, path)


def _builtin(name: str, model: BuiltinModel, cache: Path) -> ModelSource:
    return ModelSource(
        name=name,
        display_name=model.display_name,
        path=model.locate(cache),
        is_chat=model.is_chat,
        note=model.note,
        licence=model.licence,
        cache_dir=cache,
    )


def _from_file(name: str, path: Path, cache: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        owner = f"its folder, {path.parent}" if path.suffix in (".safetensors", ".json") else "a .gguf file or a folder"
        raise ModelLoadError(f"model {name!r} is a file that is not a .gguf file; give {owner}")
    file = GgufFile(path)
    return ModelSource(
        name=name,
        display_name=path.stem,
        path=path,
        is_chat="tokenizer.chat_template" in file,
        licence=str(file.get("general.license", "")),
        cache_dir=cache,
    )


def _from_folder(name: str, path: Path, cache: Path, *, display_name: str = "") -> ModelSource:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _from_file(name, files[0], cache)
        choice = f"; it has several .gguf files, give one of them: {', '.join(map(str, files))}" if files else ""
        raise ModelLoadError(f"folder {path} has no config.json, so it is not a Hugging Face model{choice}")
    return ModelSource(
        name=name,
        display_name=display_name or path.resolve().name,
        path=path,
        is_chat=bool(chat_templates(path)),
        cache_dir=cache,
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf") or name.count("/") > 1 or "\\" in name


def _not_found(name: str, path: Path) -> ModelLoadError:
    builtins = list(builtin_models())
    if _looks_like_path(name):
        folder = path.parent
        if not folder.is_dir():
            return ModelLoadError(f"model {name!r}: there is no folder {folder}")
        near = get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else ""
        return ModelLoadError(f"model {name!r}: there is no such file or folder{hint}")
    near = get_close_matches(name.lower(), builtins, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ModelLoadError(
        f"unknown model {name!r}; {hint}Accepted are the built-in models ({', '.join(builtins)}), a .gguf file, "
        "a Hugging Face folder (config.json and *.safetensors), and a hub id such as google/gemma-3-270m"
    )
