"""`GET /api/state` and its stream: what the page shows of engine and cache."""

import asyncio
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from cygnet.api.errors import ClientDisconnectedError
from cygnet.api.lifecycle import run_watched
from cygnet.api.record import record_of
from cygnet.api.service import Service
from cygnet.api.sse import EventStream
from cygnet.base.errors import EngineDeadError
from cygnet.version import __version__

INTERVAL_S = 0.5


def snapshot(service: Service) -> dict[str, Any]:
    """The state as JSON. `time_ms` is when it was taken, on a clock that only runs forward."""
    ready = service.engine.ready
    geometry = ready.geometry
    cache = {
        "tiers": ready.tiers,
        "block_size": ready.block_size,
        "window": geometry.window,
        "rebuild_tokens": geometry.rebuild_tokens,
        "full_token_bytes": geometry.full.token_bytes,
        "swa_token_bytes": geometry.swa.token_bytes,
    }
    return {
        "version": __version__,
        "healthy": service.healthy,
        "time_ms": time.monotonic_ns() // 1_000_000,
        "uptime_s": round(time.monotonic() - service.started, 1),
        "in_flight": service.engine.num_in_flight,
        "model": service.card,
        "max_model_len": ready.max_model_len,
        "summary": ready.summary,
        "has_chat_template": service.tokenizer.has_chat_template,
        "cache": cache,
        "stats": service.engine.stats,
    }


class StateStream:
    """Server-sent events with a snapshot each, until the client leaves or the server drains."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        try:
            await run_watched(self._events(stream), receive, self._service.lifecycle)
        except ClientDisconnectedError:
            record_of(scope).disconnected = True
        except EngineDeadError:
            await stream.end()

    async def _events(self, stream: EventStream) -> None:
        draining = self._service.lifecycle.draining
        while True:
            await stream.event(snapshot(self._service))
            if draining.is_set():
                break
            try:
                await asyncio.wait_for(draining.wait(), INTERVAL_S)
            except TimeoutError:
                continue
        await stream.end()
