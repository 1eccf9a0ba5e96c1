"""What the API needs of an engine, wherever that engine runs. Implemented by `cygnet.engine.runtime.client` (a process
apart) and by the tests' fake; both pass the same contract test (`tests/contracts/engine_client.py`)."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.base.messages import AddRequest, CacheChanged, EngineReady, EngineStats, RequestOutput


class EngineClient(Protocol):
    """An engine as seen from an asyncio program."""

    @property
    def ready(self) -> EngineReady:
        """What the engine said of itself at start."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot received."""

    @property
    def healthy(self) -> bool:
        """False once the engine has died or is shutting down."""

    @property
    def num_in_flight(self) -> int:
        """Sequences added and not yet finished."""

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Add `request`; yield its outputs until the one with a `finish_reason`.

        Closing the generator early (a client that disconnects, a stop string) aborts the sequence in the engine.
        Outputs not yet consumed are merged, so a slow reader costs bounded memory.
        Raises `EngineDeadError` when the engine is or goes away, `QueueFullError` beyond the bound on waiting requests.
        """

    async def flush_cache(self, *, store: bool = False) -> FlushReport:
        """Drop all cached blocks of device and host that no running request holds, and with `store` what the store has
        of this model; what that was. Raises `EngineDeadError` when the engine is or goes away."""

    async def inspect_cache(self, limit: int) -> CacheReport:
        """What is cached where, with the `limit` sequences used last. Raises as `flush_cache`."""

    def watch_cache(self, listener: Callable[[CacheChanged], None] | None) -> None:
        """Have `listener` called with all that is cached, and from then on with every change; `None` ends it.

        Another call, also with the same listener, makes the engine tell everything again. There is one listener.
        """

    async def aclose(self, *, drain_s: float = 0.0) -> None:
        """Stop the engine, after waiting up to `drain_s` seconds for sequences in flight. Idempotent."""
