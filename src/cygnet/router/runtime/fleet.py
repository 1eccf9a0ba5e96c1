"""The workers as this router sees them: registered, probed, healthy, serving which models."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import httptools
import msgspec

from cygnet.base.errors import StateUnavailableError
from cygnet.router.config import WorkersSettings
from cygnet.router.health import HealthSettings, WorkerHealth
from cygnet.router.runtime.descriptors import is_own_fault
from cygnet.router.runtime.upstream import WorkerPool
from cygnet.router.state import State
from cygnet.router.view import Member, Roster, WorkerRecord

log = logging.getLogger(__name__)

NS = 1_000_000_000
MAX_PROBE_BYTES = 4 << 20
FIRST_PROBE_S = 0.2
"""Between probes of a worker that has not answered yet, or no longer."""
CARDS_S = 30.0
"""Between looks at a worker's models."""


class Worker:
    """One worker: its place in the roster, its health, its connections."""

    def __init__(self, slot: int, record: WorkerRecord, settings: WorkersSettings) -> None:
        self.slot = slot
        self.record = record
        self.health = WorkerHealth(
            HealthSettings(
                probe_failures=settings.probe_failures,
                probe_successes=settings.probe_successes,
                breaker_failures=settings.breaker_failures,
                open_ns=int(settings.breaker_open_s * NS),
            )
        )
        self.pool = WorkerPool(record.url, settings.connect_s)
        self.cards: dict[str, bytes] = {}
        """Its models: name -> card, as the worker gives it."""
        self.refused_connection = False
        """It was gone since the last good probe: what it had cached is lost."""
        self.probe_error = "not probed yet"

    @property
    def url(self) -> str:
        return self.record.url


class _Collector:
    """An answer to a probe."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


async def fetch(url: str, path: str, authorization: bytes, timeout_s: float) -> tuple[int, bytes]:
    """GET on a connection of its own: status and body, which is bounded. Raises `OSError`, `TimeoutError`,
    `ValueError`.
    """
    parts = urlsplit(url)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n" % (path.encode(), parts.netloc.encode())
            head += b"Authorization: %s\r\n\r\n" % authorization if authorization else b"\r\n"
            writer.write(head)
            collector = _Collector()
            parser = httptools.HttpResponseParser(collector)
            while not collector.is_complete:
                data = await reader.read(65536)
                if not data:
                    break
                try:
                    parser.feed_data(data)
                except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                    raise ValueError(f"not HTTP: {error}") from None
                if len(collector.body) > MAX_PROBE_BYTES:
                    raise ValueError("answer too long")
            return parser.get_status_code(), bytes(collector.body)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


def read_cards(body: bytes) -> dict[str, bytes]:
    """Model cards by name of an answer of `/v1/models`. Raises `ValueError`."""
    try:
        raw = msgspec.json.decode(body, type=_Models).data
        return {msgspec.json.decode(card, type=_Card).id: bytes(card) for card in raw}
    except msgspec.DecodeError as error:
        raise ValueError(f"/v1/models: {error}") from None


class Fleet:
    """Follows the roster of the state and probes every worker in it.

    While the state can't be reached, the last roster stays in force; workers that were given at the start and have no
    slot yet get provisional ones, below 0, which are good for placing without the state.
    """

    def __init__(
        self,
        state: State,
        settings: WorkersSettings,
        static: tuple[WorkerRecord, ...],
        authorization: bytes,
        now: Callable[[], int],
    ) -> None:
        self._state = state
        self._settings = settings
        self._static = static
        self.authorization = authorization
        """Header for requests of the router's own to workers; empty: none."""
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, Worker] = {}
        self._by_slot: dict[int, Worker] = {}
        self._urls: dict[int, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._members: dict[str, tuple[Member, ...]] = {}
        self._provisional = 0
        self._epoch = self._version = -1  # of the roster in use
        self.on_change: Callable[[], None] = lambda: None
        """Called when a worker may have become available."""

    # --- asked for each request

    def by_slot(self, slot: int) -> Worker | None:
        return self._by_slot.get(slot)

    @property
    def urls_by_slot(self) -> dict[int, str]:
        """Urls of all workers, by slot. The same object as long as nothing changes."""
        return self._urls

    @property
    def workers(self) -> list[Worker]:
        """All, by url."""
        return [self._workers[url] for url in sorted(self._workers)]

    @property
    def models(self) -> dict[str, bytes]:
        """Cards of all models that some available worker serves."""
        cards: dict[str, bytes] = {}
        for worker in self.workers:
            if worker.health.up:
                for name, card in worker.cards.items():
                    cards.setdefault(name, card)
        return cards

    def members(self, model: str) -> tuple[Member, ...]:
        """Who may get a request for `model` now (empty: any worker). The same tuple as long as nothing changes."""
        known = self._members.get(model)
        if known is None:
            now = self._now()
            known = tuple(
                Member(worker.slot, worker.url, worker.record.group)
                for worker in self.workers
                if not worker.record.draining
                and worker.record.role == "serve"
                and (not model or model in worker.cards)
                and worker.health.available(now)
            )
            # An open breaker changes with time alone, so then nothing is kept.
            # What nobody serves is not kept either: callers can make up any number of names.
            if known and all(worker.health.circuit == "closed" for worker in self._workers.values()):
                self._members[model] = known
        return known

    def changed(self) -> None:
        """Forget what was derived from the workers' health."""
        self._members.clear()
        self._urls = {slot: worker.url for slot, worker in self._by_slot.items()}
        self.on_change()

    def recovered(self, worker: Worker) -> None:
        """A worker on trial has answered."""
        worker.health.succeeded()
        log.warning("worker %s answers again", worker.url)
        self.changed()

    def failed(self, worker: Worker, kind: str) -> None:
        """A request to the worker failed."""
        if kind == "refused":
            worker.refused_connection = True
        if worker.health.failed(self._now()):
            log.warning("worker %s: too many failures (%s), no requests for a while", worker.url, kind)
            self._members.clear()

    # --- roster

    async def sync(self) -> None:
        """Bring the workers in line with the roster, and the roster in line with the workers given at the start."""
        for probe in self._probes.values():
            if probe.done():
                probe.result()  # probes never end by themselves: this raises
        try:
            roster = await self._state.roster()
            if roster.epoch != self._epoch:  # the first time, or the state was emptied
                for record in self._missing(roster):
                    ttl_s = self._settings.probe_s * 4 if record.expires_at else 0.0
                    await self._state.join(record, ttl_s)
                roster = await self._state.roster()
        except StateUnavailableError:
            if self._epoch < 0 and not self._workers:
                for record in self._static:
                    self._provisional -= 1
                    self._add(self._provisional, record)
            return
        if (roster.epoch, roster.version) != (self._epoch, self._version):
            self._apply(roster)

    def _missing(self, roster: Roster) -> list[WorkerRecord]:
        """What the roster lacks of the workers given at the start and of those known. A drain that was ordered
        stays.
        """
        registered = {record.url: record for record in roster.workers.values()}
        wanted = {worker.url: worker.record for worker in self._workers.values() if worker.url not in registered}
        for record in self._static:
            known = registered.get(record.url) or wanted.get(record.url) or record
            wanted[record.url] = msgspec.structs.replace(record, draining=known.draining)
        return [record for record in wanted.values() if registered.get(record.url) != record]

    def _apply(self, roster: Roster) -> None:
        self._epoch, self._version = roster.epoch, roster.version
        urls = {record.url for record in roster.workers.values()}
        for url in self._workers.keys() - urls:
            self._remove(url)
        for slot, record in roster.workers.items():
            worker = self._workers.get(record.url)
            if worker is None:
                self._add(slot, record)
            else:
                if worker.slot != slot:
                    worker.refused_connection = False  # another router has seen the restart first
                worker.slot, worker.record = slot, record
        self._by_slot = {worker.slot: worker for worker in self._workers.values()}
        self.changed()

    def _add(self, slot: int, record: WorkerRecord) -> None:
        worker = Worker(slot, record, self._settings)
        self._workers[record.url] = worker
        self._by_slot[slot] = worker
        self._probes[record.url] = self._loop.create_task(self._probe_always(worker), name=f"probe {record.url}")
        log.info("worker %s joined", record.url)

    def _remove(self, url: str) -> None:
        worker = self._workers.pop(url)
        self._probes.pop(url).cancel()
        worker.pool.retire()
        log.info("worker %s left", url)

    # --- probes

    async def _probe_always(self, worker: Worker) -> None:
        looked = -CARDS_S
        while True:
            try:
                error = await self._probe(worker)
                stale = self._loop.time() - looked >= CARDS_S or not worker.cards or worker.refused_connection
                if not error and stale:
                    error = await self._look(worker)
                    looked = self._loop.time()
            except OSError as fault:  # our own: it says nothing about the worker
                log.warning("worker %s can't be probed: %s", worker.url, fault)
                await asyncio.sleep(self._settings.probe_s)
                continue
            worker.probe_error = error
            if not error and worker.refused_connection:
                await self._restarted(worker)
            if worker.health.probed(not error):
                log.log(
                    logging.INFO if worker.health.up else logging.WARNING,
                    "worker %s is %s",
                    worker.url,
                    f"up: {', '.join(worker.cards)}" if worker.health.up else f"down: {error}",
                )
                self.changed()
            soon = not worker.health.up or error
            await asyncio.sleep(min(FIRST_PROBE_S, self._settings.probe_s) if soon else self._settings.probe_s)

    async def _probe(self, worker: Worker) -> str:
        """What is wrong with the worker; empty: nothing. Raises `OSError` when the fault is this machine's."""
        try:
            status, _ = await fetch(
                worker.url, self._settings.health_path, self.authorization, self._settings.probe_timeout_s
            )
        except TimeoutError:
            return f"no answer to {self._settings.health_path} within {self._settings.probe_timeout_s:g} s"
        except ConnectionRefusedError as error:
            worker.refused_connection = worker.health.up is not None
            return str(error)
        except (OSError, ValueError) as error:
            if is_own_fault(error):
                raise
            return str(error) or type(error).__name__
        return "" if status == 200 else f"{self._settings.health_path} answered {status}"

    async def _look(self, worker: Worker) -> str:
        """Read the worker's model cards; what is wrong with them, or `OSError`, as `_probe`."""
        try:
            status, body = await fetch(worker.url, "/v1/models", self.authorization, self._settings.probe_timeout_s)
            if status != 200:
                return f"/v1/models answered {status}"
            cards = read_cards(body)
        except (OSError, TimeoutError, ValueError) as error:
            if is_own_fault(error):
                raise
            return str(error) or type(error).__name__
        if cards != worker.cards:
            worker.cards = cards
            self.changed()
        return ""

    async def _restarted(self, worker: Worker) -> None:
        """It was away and is back: what it had cached is gone, so it gets a new slot."""
        with suppress(StateUnavailableError):
            if worker.slot >= 0:
                await self._state.restart(worker.url, worker.slot)
            worker.refused_connection = False
            await self.sync()

    async def aclose(self) -> None:
        """Stop probing and close all connections."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        for probe in probes:
            with suppress(asyncio.CancelledError):
                await probe
        for worker in self._workers.values():
            await worker.pool.aclose()
