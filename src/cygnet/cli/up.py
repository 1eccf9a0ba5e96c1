"""`cygnet up`: a fleet on this machine, in one command. What runs it is in `cygnet.cli.fleet`."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO
from urllib.parse import urlsplit

import typer

from cygnet.cli.options import Sets

if TYPE_CHECKING:
    from cygnet.cli.fleet import Fleet, Part, Probe

LOCAL = "127.0.0.1"
MAX_WORKERS = 64


def up(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", show_default=False, help="as for `cygnet serve` [gemma3-270m]")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_WORKERS, help="servers")] = 2,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address of router and status page")] = LOCAL,
    port: Annotated[int, typer.Option(metavar="PORT", help="port of the router, 0: any free one")] = 8080,
    status_port: Annotated[int, typer.Option(metavar="PORT", help="port of the status page, 0: any free one")] = 8081,
    policy: Annotated[str, typer.Option(metavar="NAME", help="how the router chooses")] = "cache_aware",
    gcache: Annotated[
        str, typer.Option(metavar="SIZE", help="share KV in a GCache of this size", show_default="")
    ] = "",
    redis: Annotated[bool, typer.Option("--redis", help="keep the router's state in a redis-server")] = False,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="append the log there, not to stdout")] = None,
    sets: Sets = None,
    router_sets: Annotated[
        list[str] | None, typer.Option("--router-set", metavar="A.B=C", help="any setting of the router; repeatable")
    ] = None,
) -> None:
    """Run a router and several servers on this machine.

    Until SIGTERM or Ctrl-C; a process that dies is started again.

    Callers' keys are taken from CYGNET_API_KEY, as by `cygnet router`.
    """
    import asyncio

    from cygnet.base.errors import ConfigError

    parts = plan_fleet(
        model,
        workers=workers,
        host=host,
        port=port or free_port(host),
        policy=policy,
        gcache=gcache,
        redis=redis,
        sets=sets or [],
        router_sets=router_sets or [],
    )
    try:
        stream = log.open("a") if log is not None else sys.stdout
    except OSError as error:
        raise ConfigError(f"can't write --log {log}: {error.strerror}") from None
    try:
        asyncio.run(_run(parts, stream, host, status_port))
    finally:
        if stream is not sys.stdout:
            stream.close()


def free_port(host: str = LOCAL) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def plan_fleet(
    model: str | None,
    *,
    workers: int,
    host: str,
    port: int,
    policy: str,
    gcache: str,
    redis: bool,
    sets: list[str],
    router_sets: list[str],
) -> "list[Part]":
    """The processes, with their addresses. Raises `ConfigError` when one can't be had."""
    from cygnet.base.errors import ConfigError
    from cygnet.cli.fleet import Part, cygnet_command

    parts: list[Part] = []
    serve = ["serve", *([model] if model else []), *(word for text in sets for word in ("--set", text))]
    route = ["router", "--host", host, "--port", str(port), "--policy", policy]
    route += [word for text in router_sets for word in ("--set", text)]
    if redis:
        binary = shutil.which("redis-server")
        if binary is None:
            raise ConfigError("--redis needs redis-server, which is not on the PATH; install it, or leave --redis out")
        at = free_port()
        command = [binary, "--port", str(at), "--bind", LOCAL, "--save", "", "--appendonly", "no"]
        parts.append(Part("redis", command, _listens(LOCAL, at), 0, f"redis://{LOCAL}:{at}"))
        route += ["--redis", parts[-1].url]
    if gcache:
        at = free_port()
        command = cygnet_command("gcache", "serve", "--port", str(at), "--memory", gcache)
        parts.append(Part("gcache", command, _listens(LOCAL, at), 0, f"gcache://{LOCAL}:{at}"))
        serve += ["--store", parts[-1].url]
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    # A fleet's callers authenticate to the router; its servers listen to this machine only.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "CYGNET_API_KEY": ""}
    for number in range(1, workers + 1):
        url = f"http://{LOCAL}:{free_port()}"
        command = cygnet_command(*serve, "--host", LOCAL, "--port", url.rpartition(":")[2])
        parts.append(Part(f"worker-{number}", command, _healthy(url), 1, url, environment))
        route += ["--worker", url]
    reachable = LOCAL if host in ("0.0.0.0", "::") else host
    url = f"http://{reachable}:{port}"
    parts.append(Part("router", cygnet_command(*route), _healthy(url), 2, url, stop_s=40.0))
    return parts


def _healthy(url: str) -> "Probe":
    from cygnet.router.runtime.fleet import fetch

    async def probe() -> bool:
        try:
            return (await fetch(url, "/health", b"", 2.0))[0] == 200
        except (OSError, TimeoutError, ValueError):
            return False

    return probe


def _listens(host: str, port: int) -> "Probe":
    import asyncio

    async def probe() -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 2.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    return probe


async def _run(parts: "list[Part]", stream: TextIO, host: str, status_port: int) -> None:
    import asyncio

    from cygnet.base.errors import ConfigError
    from cygnet.cli.fleet import Fleet
    from cygnet.cli.fleet_page import serve_status

    fleet = Fleet(parts, stream)
    try:
        page = await serve_status(fleet, host, status_port)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{status_port}: {error.strerror}; choose another port with --status-port"
        ) from None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, fleet.stop)
    at = page.sockets[0].getsockname()
    fleet.write("up", f"status page: http://{at[0]}:{at[1]}")
    try:
        await fleet.run(lambda: _say_ready(fleet))
    finally:
        page.close()
        fleet.write("up", "all parts have ended")


def _say_ready(fleet: "Fleet") -> None:
    workers = sum(child.part.name.startswith("worker-") for child in fleet.children)
    url = fleet.children[-1].part.url
    fleet.write("up", f"ready: {url}/v1  ({workers} workers; port {urlsplit(url).port} answers as one OpenAI API)")
