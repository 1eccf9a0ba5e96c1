"""A server process for the signal test: prints its address, `draining` after a signal, `closed` at the end. Its engine
says one token, then waits for a line on standard input."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cygnet.api.app import create_app
from cygnet.api.card import ModelCard
from cygnet.api.server import serve
from cygnet.base.config import ApiSettings
from fakes.engine import FakeEngine
from fakes.tokenizer import VOCAB_SIZE, FakeTokenizer


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main() -> None:
    engine = FakeEngine(lambda r: [100] * 1000, vocab_size=VOCAB_SIZE, manual=True)
    settings = ApiSettings(port=0, drain_s=20.0)
    app = create_app(engine, FakeTokenizer(), settings, ModelCard(id="fake-model", created=0))

    async def feed() -> None:
        await engine.wait_added(1)
        engine.step()
        await app.state.service.lifecycle.draining.wait()
        say("draining")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        engine.step(100)

    async with asyncio.TaskGroup() as group:
        feeder = group.create_task(feed())
        await serve(app, settings, on_ready=lambda host, port: say(f"{host} {port}"))
        feeder.cancel()
    await engine.aclose()
    say("closed")


asyncio.run(main())
