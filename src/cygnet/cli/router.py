"""`cygnet router`: the options. What they start is in `cygnet.router.runtime.service`."""

from typing import TYPE_CHECKING, Annotated

import typer

from cygnet.cli.options import ConfigFile, LogLevel

if TYPE_CHECKING:
    from cygnet.router.config import RouterConfig
    from cygnet.router.runtime.proxy import Proxy


def router(
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="a worker, http://host:port; repeatable", show_default=False),
    ] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="share state: redis://host:port")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="port to listen on, 0: any free one [8080]")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="how to choose a worker [cache_aware]")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="require a key (or CYGNET_API_KEY); repeatable")
    ] = None,
    file: ConfigFile = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="any setting (--show-config); repeatable"),
    ] = None,
    log_level: LogLevel = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="print every setting and exit")] = False,
) -> None:
    """Route requests to workers that hold their prefix."""
    import asyncio
    import os

    from cygnet.cli.console import check_log_level, configure_logging
    from cygnet.router.config import resolve

    configure_logging(check_log_level(log_level))
    options = {
        "workers.urls": tuple(worker) if worker else None,
        "redis.url": redis,
        "server.host": host,
        "server.port": port,
        "routing.policy": policy,
        "auth.api_keys": tuple(api_key) if api_key else None,
    }
    config, sources = resolve(file=file, sets=sets or (), options=options, environment=os.environ)
    if show_config:
        _print_settings(config, sources)
        return
    from cygnet.router.runtime.service import listen, serve

    listener = listen(config.server.host, config.server.port)
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        run = asyncio.run
    else:
        run = uvloop.run
    run(serve(config, listener, lambda proxy: _say_ready(config, proxy, listener.getsockname())))


def _say_ready(config: "RouterConfig", proxy: "Proxy", address: tuple[str, int]) -> None:
    """What listens where, on standard output, for people and for scripts that wait for it."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    workers = len(proxy.fleet.workers)
    state = "Redis" if config.redis.url else "this process"
    print(
        f"Router ready: http://{host}:{address[1]}  ({workers} workers, {config.routing.policy}, state in {state})",
        flush=True,
    )
    if not workers:
        print("No workers yet: start with --worker URL, or POST /workers", flush=True)
    if config.redis.url and not proxy.state.reachable:
        print("Redis does not answer; requests are placed without it until it does", flush=True)


def _print_settings(config: "RouterConfig", sources: dict[str, str]) -> None:
    """A TOML document that `--config` reads back, with sources; secrets are hidden."""
    import msgspec

    from cygnet.base.settings import field_docs
    from cygnet.router.config import SECRET_PATHS

    section = ""
    for path, description in field_docs(type(config)).items():
        head, name = path.split(".")
        if head != section:
            print(f"\n[{head}]" if section else f"[{head}]")
            section = head
        value = getattr(getattr(config, head), name)
        shown = "# " if path in SECRET_PATHS and value else ""
        text = '"(hidden)"' if shown else msgspec.json.encode(value).decode()
        source = "" if sources[path] == "default" else f"  ({sources[path]})"
        print(f"# {description}{source}\n{shown}{name} = {text}")
