"""`cygnet config show`: every setting, its value, where the value came from, what it means."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cygnet.cli.options import ConfigFile, Sets, resolve_config

if TYPE_CHECKING:
    from cygnet.base.config import ResolvedConfig

config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True, rich_markup_mode=None)

HIDDEN = "(hidden)"


@config_app.callback()
def config() -> None:
    """Look at the settings."""


@config_app.command()
def show(
    file: ConfigFile = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="print a file for --config")] = False,
) -> None:
    """Print every setting: value, source, meaning. Secrets are hidden."""
    from cygnet.cli.console import print_json

    if as_json and as_toml:
        raise typer.BadParameter("choose one of --json and --toml")
    resolved = resolve_config(file, sets)
    if as_json:
        print_json(settings(resolved))
    elif as_toml:
        print(to_toml(resolved), end="")
    else:
        _print_table(resolved)


def settings(resolved: "ResolvedConfig") -> dict[str, dict[str, Any]]:
    """By dotted path: value (secrets hidden when set), source and description, in the order of the sections."""
    from cygnet.base.config import SECRET_PATHS, field_docs

    rows = {}
    for path, description in field_docs().items():
        section, name = path.split(".")
        value = getattr(getattr(resolved.config, section), name)
        if path in SECRET_PATHS and value:
            value = HIDDEN
        rows[path] = {"value": value, "source": resolved.sources[path], "description": description}
    return rows


def to_toml(resolved: "ResolvedConfig") -> str:
    """A TOML document that `--config` reads back to the same values; a secret is left as a comment."""
    lines: list[str] = []
    section = ""
    for path, row in settings(resolved).items():
        head, name = path.split(".")
        if head != section:
            lines += ([""] if lines else []) + [f"[{head}]"]
            section = head
        if row["description"]:
            lines.append(f"# {row['description']}")
        secret = "# " if row["value"] == HIDDEN else ""
        lines.append(f"{secret}{name} = {_toml_value(row['value'])}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import msgspec

        return msgspec.json.encode(value).decode()  # JSON strings are TOML basic strings
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _print_table(resolved: "ResolvedConfig") -> None:
    from rich.padding import Padding
    from rich.text import Text

    from cygnet.cli.console import stdout

    console = stdout()
    section = ""
    rows = settings(resolved)
    width = max(len(path) for path in rows) + 2
    for path, row in rows.items():
        head = path.split(".")[0]
        if head != section:
            if section:
                console.print()
            console.print(Text(f"[{head}]", style="bold magenta"))
            section = head
        value = _toml_value(row["value"]) if row["value"] != HIDDEN else HIDDEN
        source = "" if row["source"] == "default" else f"  ({row['source']})"
        console.print(Text.assemble((f"{path:<{width}}", "bold"), (value, "cyan"), (source, "yellow")), soft_wrap=True)
        if row["description"]:
            console.print(Padding(Text(row["description"], style="dim"), (0, 0, 0, 4)))
    console.print(Text("\nChange one with --set path=value or a TOML file (--config); --toml prints such a file."))
