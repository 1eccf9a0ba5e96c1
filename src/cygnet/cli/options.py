"""Options that several verbs share, and how options become a resolved config."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cygnet.base.config import ResolvedConfig

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="any setting (`cygnet config show`); repeatable"),
]
LogLevel = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error [info]")
]

ServerUrl = Annotated[
    str, typer.Option("--url", metavar="URL", show_default=False, help="a running server [http://127.0.0.1:8000]")
]
ApiKey = Annotated[
    str, typer.Option(metavar="KEY", envvar="CYGNET_API_KEY", show_envvar=False, help="or CYGNET_API_KEY")
]
DEFAULT_URL = "http://127.0.0.1:8000"


def resolve_config(
    file: Path | None, sets: Sequence[str] | None, options: Mapping[str, Any] | None = None
) -> "ResolvedConfig":
    """The config that file, environment, `--set` and options (by dotted path) give together; raises `ConfigError`."""
    from cygnet.base.config import resolve

    return resolve(file=file, sets=sets or (), options=options, environment=os.environ)
