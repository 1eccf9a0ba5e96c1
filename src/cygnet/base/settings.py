"""Layers of settings laid over a config's defaults: what `cygnet.base.config` and the router's config have in common.

A config is a frozen struct of sections, each a frozen struct whose fields carry their description (`msgspec.Meta`).
"""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from cygnet.base.errors import ConfigError

Root = TypeVar("Root", bound=msgspec.Struct)


def field_docs(root: type[msgspec.Struct]) -> dict[str, str]:
    """Description of every setting of `root` by dotted path."""
    docs: dict[str, str] = {}
    for section, hint in get_type_hints(root).items():
        for name, annotated in get_type_hints(hint, include_extras=True).items():
            metas = [m for m in getattr(annotated, "__metadata__", ()) if isinstance(m, Meta)]
            docs[f"{section}.{name}"] = next((m.description for m in metas if m.description), "")
    return docs


def lay_over(
    root: type[Root],
    *,
    file: Path | None = None,
    secrets: Mapping[str, tuple[str, str]] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    secret_paths: frozenset[str] = frozenset(),
) -> tuple[Root, dict[str, str]]:
    """The config that the layers give, weakest first, and the source of every value.

    `secrets` maps paths to (environment variable, value or empty). Raises `ConfigError`; the values of `secret_paths`
    are not shown in it.
    """
    known = field_docs(root)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known, "default")

    def put(path: str, value: Any, source: str) -> None:
        if path not in known:
            near = get_close_matches(path, known, n=1) or get_close_matches(path.split(".")[-1], _leaves(known), n=1)
            hint = f"; did you mean {_full_path(near[0], known)!r}?" if near else ""
            raise ConfigError(f"unknown setting {path!r} ({source}){hint}")
        values[path] = value
        sources[path] = source

    if file is not None:
        for path, value in _read_toml(file).items():
            put(path, value, f"file {file}")
    for path, (variable, secret) in (secrets or {}).items():
        if secret:
            put(path, secret, f"env {variable}")
    for item in sets:
        path, eq, text = item.partition("=")
        if not eq:
            raise ConfigError(f"--set {item!r} needs the form path=value, for example --set {next(iter(known))}=...")
        put(path.strip(), _parse_scalar(text.strip()), "--set")
    for path, value in (options or {}).items():
        if value is not None:
            put(path, value, "option")
    return _build(root, values, secret_paths), sources


def _build(root: type[Root], values: Mapping[str, Any], secret_paths: frozenset[str]) -> Root:
    """Convert with types checked, one path at a time so that the error names it."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, name = path.split(".")
        section_type = get_type_hints(root)[section]
        hint = get_type_hints(section_type, include_extras=True)[name]
        if isinstance(value, int | float) and not isinstance(value, bool) and get_type_hints(section_type)[name] is str:
            value = str(value)
        try:
            nested.setdefault(section, {})[name] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            shown = "(hidden)" if path in secret_paths else repr(value)
            raise ConfigError(f"setting {path} = {shown}: {error}") from None
    return msgspec.convert(nested, root)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"can't read config file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from None
    flat: dict[str, Any] = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            raise ConfigError(f"config file {file}: {section!r} must be a section such as [{section}]")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _parse_scalar(text: str) -> Any:
    """A `--set` value: TOML where it parses as TOML (numbers, booleans, lists), else the text itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _leaves(known: Mapping[str, str]) -> list[str]:
    return [path.split(".")[1] for path in known]


def _full_path(near: str, known: Mapping[str, str]) -> str:
    return near if near in known else next(path for path in known if path.endswith("." + near))
