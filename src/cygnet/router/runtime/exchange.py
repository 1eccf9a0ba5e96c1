"""One request's way: placed, sent, answered; or placed again, or given up. Everything it holds is let go exactly
once.
"""

from typing import TYPE_CHECKING

from cygnet.metrics import router as names
from cygnet.router.prompt import Prompt
from cygnet.router.runtime.client import ClientConnection
from cygnet.router.runtime.upstream import OWN_FAULT, UpstreamConnection
from cygnet.router.runtime.wire import (
    LAST_CHUNK,
    HttpRequest,
    ResponseHead,
    chunk,
    error_body,
    own_response,
    request_head,
    response_head,
)
from cygnet.router.state import Decision, Lease, NoRoom

if TYPE_CHECKING:
    from cygnet.router.runtime.fleet import Worker
    from cygnet.router.runtime.proxy import Proxy

RETRIED = frozenset((429, 502, 503, 504))
"""Statuses by which a worker says that it can't now; another one may."""

SETTLE_TOKENS = 512
"""Prefills smaller than this are not worth a message when they are done."""

NO_DEADLINE = float("inf")


class Exchange:
    """Serves one request. A `Handler` for the caller's side and a `Receiver` for the worker's.

    The answer's head is held back until the first byte of its body: until then the request can go to another worker.
    Once a byte has been sent on, a failure breaks the connection off, so that the caller sees it.
    """

    def __init__(
        self,
        proxy: "Proxy",
        client: ClientConnection,
        request: HttpRequest,
        prompt: Prompt,
        key: bytes,
        lease_id: str,
        request_id: bytes,
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._loop = proxy.loop
        self._request = request
        self._key = key
        self._upstream: UpstreamConnection | None = None
        self._head: ResponseHead | None = None
        self._chunked = False
        self._started = False
        self._paused = False
        self._sent_bytes = 0
        self.trace = proxy.tracing.begin(request, request_id) if proxy.tracing is not None else None
        self.prompt = prompt
        self.lease_id = lease_id
        self.request_id = request_id
        self.began = self._loop.time()
        self.first_byte = 0.0
        self.deadline = NO_DEADLINE
        self.done = False
        self.tried: set[str] = set()
        self.attempts = 0
        self.worker: Worker | None = None
        self.cost = 0
        self.matched_tokens = 0

    @property
    def lease(self) -> Lease | None:
        """What it holds of a worker, on the slot that the worker has now."""
        return Lease(self.lease_id, self.worker.slot, self.cost) if self.worker is not None and self.cost else None

    # --- placing

    def placed(self, decision: Decision) -> None:
        """Send to the chosen worker."""
        if self.done:  # the caller left while the decision was made
            self._proxy.state.release(self.lease_id)
            return
        worker = self._proxy.fleet.by_slot(decision.slot)
        self.cost, self.matched_tokens = decision.cost, decision.matched_tokens
        if worker is None:  # it left while the decision was made
            self._proxy.place(self)
            return
        self.worker = worker
        self.attempts += 1
        self._proxy.note_placed(self, decision)
        worker.health.sent(self._proxy.now())
        self._send(fresh=False)

    def _send(self, *, fresh: bool) -> None:
        worker = self.worker
        assert worker is not None
        self._head, self._upstream = None, None
        context = self.trace.sent(worker.url) if self.trace is not None else None
        head = request_head(self._request, worker.pool.host_header, self.request_id, self._proxy.authorization, context)
        self.deadline = self._loop.time() + self._proxy.config.workers.first_byte_s
        upstream = worker.pool.send(self, head, self._request.body, fresh=fresh)
        if upstream is not None:
            self._upstream = upstream

    def no_room(self, found: NoRoom) -> None:
        """Every worker is at its budget: wait."""
        if not self.done:
            self._proxy.enqueue(self, max(0, self.prompt.tokens - found.matched_tokens))

    def fail(self, status: int, message: str, code: str, retry_after_s: int = 0) -> None:
        """Answer with an error of the router's own; only before the first byte."""
        if self.done:
            return
        kind = "rate_limit_error" if status == 429 else "router_error"
        headers = [("X-Request-Id", self.request_id.decode("latin-1"))]
        if retry_after_s:
            headers.append(("Retry-After", str(retry_after_s)))
        keep_alive = self._request.keep_alive
        self._client.write(
            own_response(status, error_body(message, kind, code), keep_alive=keep_alive, headers=headers)
        )
        self._proxy.recorder.add(names.REJECTED, (code,))
        self._end(status)
        self._client.finish(keep_alive=keep_alive)

    # --- the worker's side

    def connected(self, connection: UpstreamConnection) -> None:
        """A connection was made and the request sent on it."""
        if self.done:
            connection.abort()
        else:
            self._upstream = connection

    def head(self, head: ResponseHead) -> None:
        """The worker answers. A refusal for want of room, or by a worker that is failing, is tried elsewhere."""
        assert self.worker is not None
        if head.status in RETRIED and self._can_retry():
            assert self._upstream is not None
            self._upstream.abort()
            self._judge(head.status)
            if self.trace is not None:
                self.trace.answered(head.status)
            self._retry()
            return
        self._judge(head.status)
        self._head = head
        self.deadline = self._loop.time() + self._proxy.config.workers.first_byte_s

    def _judge(self, status: int) -> None:
        worker = self.worker
        assert worker is not None
        if status >= 500:
            self._proxy.worker_failed(worker, f"http_{status}")
        elif status >= 400:
            worker.health.refused()
        elif worker.health.circuit != "closed":
            self._proxy.fleet.recovered(worker)

    def body(self, pieces: list[bytes]) -> None:
        """Pass bytes on, as they come."""
        data = b""
        if not self._started:
            data = self._start()
        payload = chunk(pieces) if self._chunked else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._sent_bytes += len(payload)
        if not self._paused:
            self.deadline = self._loop.time() + self._proxy.config.workers.between_bytes_s
        self._client.write(data + payload if data else payload)

    def _start(self) -> bytes:
        """The first byte is here: from now on there is no other worker. Returns the head to send."""
        assert self._head is not None
        self._started = True
        self.first_byte = self._loop.time()
        self._proxy.recorder.observe(names.FIRST_BYTE, self.first_byte - self.began)
        if self.trace is not None:
            self.trace.first_byte()
        if self.cost >= SETTLE_TOKENS:
            self.cost = self._proxy.config.routing.request_tokens
            self._proxy.state.settle(self.lease_id, self.cost)
        head, self._chunked = response_head(self._head, self._request, self.request_id)
        return head

    def complete(self) -> None:
        """The answer is whole."""
        assert self._head is not None
        assert self.worker is not None
        self._upstream = None
        data = b"" if self._started else self._start()
        if self._chunked:
            data += LAST_CHUNK
        if data:
            self._client.write(data)
        if self._head.status < 400:
            self.worker.health.succeeded()
        if self.trace is not None:
            self.trace.answered(self._head.status)
        self._end(self._head.status)
        self._client.finish(keep_alive=self._request.keep_alive)

    def lost(self, kind: str, stale: bool) -> None:
        """The worker broke off."""
        self._upstream = None
        if self.done:
            return
        if stale:  # an idle connection that the worker closed as we used it: no fault of the worker's
            self._send(fresh=True)
            return
        assert self.worker is not None
        if kind == OWN_FAULT:
            self.worker.health.refused()
            if self.trace is not None:
                self.trace.failed(kind)
            self.fail(503, "the router can make no connection now", "overloaded", retry_after_s=1)
            return
        self._proxy.worker_failed(self.worker, kind)
        if self.trace is not None:
            self.trace.failed(kind)
        if self._started:
            self._proxy.recorder.add(names.BROKEN)
            self._end(0, note=f"broken:{kind}")
            self._client.abort()
        elif self._can_retry():
            self._retry()
        else:
            status = 504 if kind == "timeout" else 502
            self.fail(status, f"the worker did not answer ({kind}), and there is no other to try", "worker_failed")

    def _can_retry(self) -> bool:
        assert self.worker is not None
        return self.attempts < self._proxy.config.workers.max_attempts and self._proxy.has_other(self)

    def _retry(self) -> None:
        assert self.worker is not None
        self._proxy.recorder.add(names.RETRIES)
        self.tried.add(self.worker.url)
        self._upstream, self._head, self.worker = None, None, None
        self.deadline = NO_DEADLINE
        self._proxy.place(self)

    # --- the caller's side

    def client_lost(self) -> None:
        """The caller is gone: so is the work."""
        if self.done:
            return
        self._drop_upstream()
        if self.worker is not None:
            self.worker.health.refused()
        self._proxy.recorder.add(names.CANCELLED)
        self._end(499)

    def client_paused(self) -> None:
        """The caller reads slowly: neither do we read on."""
        self._paused = True
        self.deadline = self._loop.time() + self._proxy.config.server.stall_s
        if self._upstream is not None:
            self._upstream.pause()

    def client_resumed(self) -> None:
        """It has caught up."""
        if not self._paused:  # with the answer before this one
            return
        self._paused = False
        self.deadline = self._loop.time() + self._proxy.config.workers.between_bytes_s
        if self._upstream is not None:
            self._upstream.resume()

    # --- time and end

    def overdue(self) -> None:
        """The deadline has passed."""
        self.deadline = NO_DEADLINE
        if self._paused:
            self._drop_upstream()
            self._end(0, note="stalled")
            self._client.abort()
            return
        self._drop_upstream()
        self.lost("timeout", False)

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        elif self.worker is not None:
            self.worker.pool.cancel(self)

    def cut(self) -> None:
        """The router stops: break off."""
        self._drop_upstream()
        self._end(0, note="shutdown")
        self._client.abort()

    def _end(self, status: int, note: str = "") -> None:
        assert not self.done
        self.done = True
        self.deadline = NO_DEADLINE
        if self.trace is not None:
            self.trace.ended(status, self.attempts, self.prompt.model, note)
        self._proxy.ended(self, status, self._key, len(self._request.body))
        self._proxy.log_access(self, self._request, status, self._sent_bytes, note)
        self.cost = 0
