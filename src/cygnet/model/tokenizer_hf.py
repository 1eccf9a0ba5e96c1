"""The tokenizer in a Hugging Face folder. Imports neither torch nor transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from cygnet.base.errors import ModelLoadError
from cygnet.model.chat_template import GEMMA_TURNS
from cygnet.model.tokenizer import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")


def load_hf_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of the model in `folder`; `ModelLoadError` names the file that is missing or unusable.

    EOS ids are those of generation_config.json, config.json and the tokenizer's own EOS token, together. Whether a text
    begins with BOS is up to the post-processor in tokenizer.json, as in transformers, which ignores `add_bos_token`.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library's only type
        raise ModelLoadError(f"can't read {path}: {error}") from None
    settings = {
        **_optional_json(folder / "special_tokens_map.json"),
        **_optional_json(folder / "tokenizer_config.json"),
    }
    names = _token_names(settings)
    templates = chat_templates(folder, settings)
    ends = _eos_ids(folder, backend, names)
    begin, end = (backend.token_to_id(mark) for mark in _GEMMA_MARKS)
    if begin is not None and end is not None:
        templates = templates or {"default": GEMMA_TURNS}
        ends.add(end)
    return Tokenizer(
        backend,
        origin=str(folder),
        bos_token_id=_bos_id(folder, backend, names),
        eos_token_ids=ends,
        template_tokens=names,
        chat_templates=templates,
    )


def chat_templates(folder: Path, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The folder's own templates by name (`default`, `tool_use`, ...); empty if it has none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            found = {"default": file.read_text(encoding="utf-8")}
            more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
            return found | {path.stem: path.read_text(encoding="utf-8") for path in more}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"can't read a chat template in {folder}: {error}") from None
    if settings is None:
        settings = _optional_json(folder / "tokenizer_config.json")
    value = _optional_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        }
    return {}


def _token_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, each a string or a serialised AddedToken."""
    names = {}
    for key in _NAMED:
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names


def _bos_id(folder: Path, backend: Backend, names: Mapping[str, str]) -> int | None:
    if "bos_token" in names:
        return backend.token_to_id(names["bos_token"])
    if (folder / "tokenizer_config.json").exists():
        return None  # the tokenizer says that there is none; config.json often repeats a default
    return next(iter(_config_ids(folder, "bos_token_id")), None)


def _eos_ids(folder: Path, backend: Backend, names: Mapping[str, str]) -> set[int]:
    ends = set(_config_ids(folder, "eos_token_id"))
    if "eos_token" in names and (own := backend.token_to_id(names["eos_token"])) is not None:
        ends.add(own)
    return ends


def _config_ids(folder: Path, key: str) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _optional_json(folder / name)
        text = config.get("text_config")
        for part in (config, text if isinstance(text, dict) else {}):
            value = part.get(key)
            ids += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return ids


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"can't read {path}: {error}") from None
    return value if isinstance(value, dict) else {}
