"""A whole server in one coroutine: socket, model, engine process, API; and down again in the reverse order."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cygnet.base.config import Config
from cygnet.base.errors import ConfigError, EngineDeadError
from cygnet.cli.banner import Stages, print_banner, server_url
from cygnet.cli.console import stderr, stdout

if TYPE_CHECKING:
    from cygnet.api.server import Server
    from cygnet.base.engine_client import EngineClient
    from cygnet.model.source import ModelSource
    from cygnet.model.tokenizer import Tokenizer

HEALTH_CHECK_S = 1.0


async def run_server(config: Config, log_level: str = "info") -> None:
    """Serve `config` until SIGINT or SIGTERM, then drain and stop the engine, which logs from `log_level` on.

    The address is taken first, so that a port in use is reported before a model is loaded. Raises `ConfigError`,
    `ModelLoadError`, and `EngineDeadError` when the engine dies under the server.
    """
    from cygnet.api.server import Server, listen
    from cygnet.engine.runtime.client import EngineProcess

    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(config.api.host, config.api.port)))
        with Stages(stderr()) as stages, _sigterm_cancels():
            stages(f"looking for {config.model.model}")
            engine = await EngineProcess.launch()
            stack.push_async_callback(engine.aclose)
            # The engine's process has imports to do, and meanwhile we have ours.
            from cygnet.api.app import create_app
            from cygnet.api.card import ModelCard
            from cygnet.model.source import find_model

            source = find_model(config.model.model, progress=stages)
            stages("loading the tokenizer")
            tokenizer = _tokenizer(source, config.model.chat_template)
            await engine.load(
                config, eos_token_ids=sorted(tokenizer.eos_token_ids), on_progress=stages, log_level=log_level
            )
        name = config.model.served_name or source.display_name
        is_chat = source.is_chat or bool(config.model.chat_template)
        card = ModelCard(
            id=name,
            created=int(time.time()),
            root=source.name,
            description=source.note,
            kind="instruct" if is_chat else "base",
        )

        def ready(host: str, port: int) -> None:
            url, summary = server_url(host, port), engine.ready.summary
            print_banner(stdout(), url, name, summary, source.note, config, is_chat=is_chat)

        server = Server(create_app(engine, tokenizer, config.api, card), config.api, ready)
        await _run_watched(server, engine, listener)


def _tokenizer(source: "ModelSource", chat_template: str) -> "Tokenizer":
    """The model's tokenizer, with the chat template in the file `chat_template` if one is named."""
    tokenizer = source.tokenizer()
    if not chat_template:
        return tokenizer
    try:
        return tokenizer.with_chat_template(Path(chat_template).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read model.chat_template = {chat_template!r}: {error}") from None


async def _run_watched(server: "Server", engine: "EngineClient", listener: socket.socket) -> None:
    """Serve until stopped; a dead engine stops the server too, since nothing could be answered any more."""
    died = False

    async def watch() -> None:
        nonlocal died
        while engine.healthy:
            await asyncio.sleep(HEALTH_CHECK_S)
        died = True
        server.stop()

    watcher = asyncio.create_task(watch())
    try:
        await server.run_on(listener)
    finally:
        watcher.cancel()
    if died:
        raise EngineDeadError("the engine process died; its last messages are above. Start the server again")


@contextlib.contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """Until the server handles signals itself, SIGTERM ends the start as Ctrl-C does: children are not left behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # not the main thread, or no such signals here
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
