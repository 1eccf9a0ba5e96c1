"""What the router answers itself: health, metrics, models, and the API of its workers."""

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from cygnet.base.errors import ConfigError, StateUnavailableError
from cygnet.metrics import router as names
from cygnet.router.config import parse_worker
from cygnet.router.limits import key_digest
from cygnet.router.runtime.client import ClientConnection
from cygnet.router.runtime.exposition import render
from cygnet.router.runtime.wire import HttpRequest, error_body, own_response

if TYPE_CHECKING:
    from cygnet.router.runtime.proxy import Proxy

OPEN_PATHS = frozenset((b"/health", b"/ready", b"/metrics"))
"""Paths that need no key."""


class WorkerOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /workers`."""

    url: str
    group: str = ""
    draining: bool = False
    ttl_s: float = 0.0


class _Silent:
    """Serves a caller whose answer is short: if it leaves, nothing is to be done."""

    def client_lost(self) -> None:
        return

    def client_paused(self) -> None:
        return

    def client_resumed(self) -> None:
        return


class Admin:
    """Answers everything but what goes to workers."""

    def __init__(self, proxy: "Proxy") -> None:
        self._proxy = proxy
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, connection: ClientConnection, request: HttpRequest) -> bool:
        """Answer a request here; `False` if it is one for a worker: any POST to other paths than `/workers`."""
        path = request.target.partition(b"?")[0]
        if path == b"/workers":
            self._workers(connection, request)
            return True
        if request.method == b"POST":
            return False
        if request.method not in (b"GET", b"HEAD"):
            self._error(connection, request, 405, f"{request.method.decode()} is not supported here", "method")
        elif path not in OPEN_PATHS and not self._is_known(request):
            self._error(connection, request, 401, "the API key is missing or wrong", "invalid_api_key")
        elif path == b"/health":
            self._json(connection, request, 200, {"status": "ok"})
        elif path == b"/ready":
            ready = bool(self._proxy.fleet.members("")) and not self._proxy.stopping
            self._json(connection, request, 200 if ready else 503, {"ready": ready})
        elif path == b"/metrics":
            body, kind = render(self._proxy.recorder, self._proxy.gauges)
            self._send(connection, request, 200, body, kind)
        elif path == b"/v1/models":
            cards = self._proxy.fleet.models
            body = b'{"object":"list","data":[' + b",".join(cards[name] for name in sorted(cards)) + b"]}"
            self._send(connection, request, 200, body)
        elif path.startswith(b"/v1/models/"):
            name = path[len(b"/v1/models/") :].decode("latin-1")
            card = self._proxy.fleet.models.get(name)
            if card is None:
                self._error(connection, request, 404, f"there is no model {name!r} here", "model_not_found")
            else:
                self._send(connection, request, 200, card)
        else:
            self._error(connection, request, 404, f"there is no {path.decode('latin-1')} here", "not_found")
        return True

    def _is_known(self, request: HttpRequest) -> bool:
        keys = self._proxy.config.auth.api_keys
        return not keys or self._proxy.caller(request) in {key_digest(key) for key in keys}

    def _may_change(self, request: HttpRequest) -> bool:
        admin = self._proxy.config.auth.admin_key
        return self._proxy.caller(request) == key_digest(admin) if admin else self._is_known(request)

    # --- workers

    def _workers(self, connection: ClientConnection, request: HttpRequest) -> None:
        if request.method == b"GET":
            if self._is_known(request) or self._may_change(request):
                self._json(
                    connection, request, 200, {"workers": [self._shown(w.url) for w in self._proxy.fleet.workers]}
                )
            else:
                self._error(connection, request, 401, "the API key is missing or wrong", "invalid_api_key")
            return
        if request.method not in (b"POST", b"DELETE"):
            self._error(connection, request, 405, "use GET, POST or DELETE", "method")
            return
        if not self._may_change(request):
            self._error(connection, request, 401, "changing workers needs the admin key", "invalid_api_key")
            return
        connection.serve(_Silent())
        task = asyncio.get_running_loop().create_task(self._change(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self, connection: ClientConnection, request: HttpRequest) -> None:
        try:
            if request.method == b"POST":
                url = await self._join(request.body)
            else:
                url = await self._leave(request.target)
            await self._proxy.fleet.sync()
            self._json(connection, request, 200, self._shown(url) if request.method == b"POST" else {"left": url})
        except (ConfigError, msgspec.DecodeError) as error:
            self._error(connection, request, 400, str(error), "invalid_worker")
        except StateUnavailableError as error:
            self._error(connection, request, 503, str(error), "state_unavailable")

    async def _join(self, body: bytes | bytearray) -> str:
        order = msgspec.json.decode(body, type=WorkerOrder)
        record = msgspec.structs.replace(parse_worker(order.url), group=order.group, draining=order.draining)
        groups = self._proxy.groups
        if record.group and record.group not in groups:
            raise ConfigError(f"there is no length bucket {record.group!r}; there is: {', '.join(groups) or 'none'}")
        if await self._proxy.state.join(record, max(0.0, order.ttl_s)) is None:
            raise ConfigError("there are as many workers as there can be; remove some with DELETE /workers")
        return record.url

    async def _leave(self, target: bytes) -> str:
        given = parse_qs(urlsplit(target.decode("latin-1")).query).get("url", [""])[0]
        url = parse_worker(given).url
        await self._proxy.state.leave(url)
        return url

    def _shown(self, url: str) -> dict[str, Any]:
        """A worker as `/workers` shows it."""
        worker = next((worker for worker in self._proxy.fleet.workers if worker.url == url), None)
        if worker is None:
            return {"url": url}
        return {
            "url": worker.url,
            "group": worker.record.group,
            "draining": worker.record.draining,
            "slot": worker.slot,
            "up": bool(worker.health.up),
            "circuit": worker.health.circuit,
            "error": worker.probe_error,
            "models": sorted(worker.cards),
            "load_tokens": self._proxy.loads.get(worker.slot, 0),
            "in_flight": sum(1 for e in self._proxy.exchanges.values() if e.worker is worker),
        }

    # --- answers

    def _json(self, connection: ClientConnection, request: HttpRequest, status: int, data: object) -> None:
        self._send(connection, request, status, msgspec.json.encode(data))

    def _error(self, connection: ClientConnection, request: HttpRequest, status: int, message: str, code: str) -> None:
        self._send(connection, request, status, error_body(message, "invalid_request_error", code))

    def _send(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        status: int,
        body: bytes,
        content_type: str = "application/json",
    ) -> None:
        answer = own_response(status, body, keep_alive=request.keep_alive, content_type=content_type)
        connection.write(answer[: len(answer) - len(body)] if request.method == b"HEAD" else answer)
        self._proxy.recorder.add(names.REQUESTS, (str(status),))
        connection.finish(keep_alive=request.keep_alive)

    async def aclose(self) -> None:
        """Wait for changes under way."""
        for task in list(self._tasks):
            await task
