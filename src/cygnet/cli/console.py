"""How every verb talks to a terminal: results on stdout, everything else on stderr, errors as one red line."""

import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LOG_LEVELS = ("debug", "info", "warning", "error")


def stdout() -> "Console":
    """Console for results. Colour and width follow the terminal; piped output is plain."""
    from rich.console import Console

    return Console(highlight=False)


def stderr() -> "Console":
    """Console for progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """One clear line (more when `message` has more) that begins with `error:`."""
    from rich.text import Text

    stderr().print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def print_note(message: str) -> None:
    """Something worth knowing that is not the result."""
    from rich.text import Text

    stderr().print(Text.assemble(("note: ", "bold yellow"), message), soft_wrap=True)


def print_json(data: object) -> None:
    """`data` as indented JSON on stdout, without colour, for other programs."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")


def configure_logging(level: str) -> None:
    """Send Cygnet's log records of `level` and above to stderr, a line each. Other packages' only from `warning` on."""
    logging.basicConfig(
        level=max(logging.WARNING, logging.getLevelName(level.upper())),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("cygnet").setLevel(level.upper())


def check_log_level(level: str | None) -> str:
    """The level asked for by option or `CYGNET_LOG_LEVEL`; `info` when neither is given."""
    from cygnet.base.errors import ConfigError

    chosen = (level or os.environ.get("CYGNET_LOG_LEVEL") or "info").lower()
    if chosen not in LOG_LEVELS:
        raise ConfigError(f"unknown log level {chosen!r}; choose one of {', '.join(LOG_LEVELS)}")
    return chosen


def show_tracebacks() -> bool:
    """Whether the user asked for details (`--log-level debug`)."""
    return logging.getLogger("cygnet").isEnabledFor(logging.DEBUG)
