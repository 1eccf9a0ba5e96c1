"""Entry point of the `cygnet` command."""

import logging
import sys
from typing import Annotated

import typer

from cygnet.cli.bench.command import bench_app
from cygnet.cli.cache import cache_app
from cygnet.cli.chat import chat
from cygnet.cli.config import config_app
from cygnet.cli.doctor import doctor
from cygnet.cli.gcache import gcache_app
from cygnet.cli.plan import plan
from cygnet.cli.router import router
from cygnet.cli.serve import serve
from cygnet.cli.simulate import simulate
from cygnet.cli.up import up
from cygnet.version import __version__

app = typer.Typer(
    name="cygnet",
    help="Serve hybrid sliding-window language models. Start with `cygnet serve`, then open http://127.0.0.1:8000.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the version."""
    print(f"cygnet {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Serve hybrid sliding-window language models. Start with `cygnet serve`, then open http://127.0.0.1:8000."""


app.command()(serve)
app.command()(router)
app.command()(up)
app.command()(chat)
app.add_typer(cache_app, name="cache")
app.command()(plan)
app.command()(simulate)
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(gcache_app, name="gcache")
app.command()(doctor)
app.command()(version)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed (one line says why), 2 wrong usage, 130 interrupted."""
    from cygnet.base.errors import CygnetError, InvariantError
    from cygnet.cli.console import print_error, show_tracebacks

    try:
        app()
    except InvariantError:
        raise  # a bug of ours: the traceback is what a report needs
    except CygnetError as error:
        if show_tracebacks():
            logging.getLogger("cygnet").exception("failed")
        print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
