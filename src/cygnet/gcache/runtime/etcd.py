"""A registry in etcd, over its JSON gateway: plain HTTP, so it needs no gRPC.

Each request has a connection of its own and goes to the endpoint that answered last; when that fails, or does not
answer in its share of the time, the others are tried. An etcd that is frozen takes connections and says nothing, so
every byte is waited for against a deadline.
"""

import http.client
import json
import os
import re
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.registry import MAX_DOCUMENT_BYTES, Document, RegistryError, Snapshot

DEFAULT_PORT = 2379
TRY_TIMEOUT_S = 1.0
"""For one endpoint. A request takes at most this for each of them."""
MAX_ANSWER_BYTES = 64 << 20
READ_BYTES = 64 << 10
USER_VARIABLE, PASSWORD_VARIABLE = "CYGNET_ETCD_USER", "CYGNET_ETCD_PASSWORD"
ENDPOINT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[0-9a-fA-F:]+)\]|(?P<host>[^:/,\[\]]+))(?::(?P<port>\d{1,5}))?/?"
)
UNAUTHENTICATED = 16
"""gRPC's code for a token that is missing or too old."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """One etcd server."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Endpoints of `[http[s]://]HOST[:PORT],...`. Raises `ConfigError`."""
    endpoints = []
    for part in text.split(","):
        match = ENDPOINT.fullmatch(part.strip())
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise ConfigError(f"etcd endpoint {part!r} is not [http[s]://]HOST[:PORT]; write http://127.0.0.1:2379")
        endpoints.append(Endpoint(match["v6"] or match["host"], port, match["scheme"] == "https"))
    return tuple(endpoints)


class Etcd:
    """A `Registry`: all keys that begin with `prefix`.

    User and password, where etcd wants them, come from CYGNET_ETCD_USER and CYGNET_ETCD_PASSWORD; certificates of https
    endpoints are checked against the system's, or SSL_CERT_FILE.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...], prefix: str, *, try_timeout_s: float = TRY_TIMEOUT_S) -> None:
        if not endpoints:
            raise ConfigError("no etcd endpoint is named; write for example http://127.0.0.1:2379")
        self._endpoints = endpoints
        self._prefix = prefix
        self._try_timeout_s = try_timeout_s
        self._tls = ssl.create_default_context() if any(endpoint.tls for endpoint in endpoints) else None
        self._user = os.environ.get(USER_VARIABLE, "")
        self._password = os.environ.get(PASSWORD_VARIABLE, "")
        self._lock = threading.Lock()
        self._first = 0
        """The endpoint to try first."""
        self._token = ""

    def read(self) -> Snapshot:
        answer = self._call("/v3/kv/range", self._range())
        documents = {
            b64decode(kv["key"]).decode().removeprefix(self._prefix): Document(
                b64decode(kv.get("value", "")), int(kv["mod_revision"])
            )
            for kv in answer.get("kvs", ())
        }
        return Snapshot(_revision(answer), documents)

    def write(self, key: str, value: bytes, *, expected: int, lease: int = 0) -> bool:
        if len(value) > MAX_DOCUMENT_BYTES:
            raise RegistryError(f"a document of {len(value)} bytes, at most {MAX_DOCUMENT_BYTES}")
        put = {"key": self._key(key), "value": b64encode(value).decode(), "lease": str(lease)}
        return self._if(key, expected, {"request_put": put})

    def remove(self, key: str, *, expected: int) -> bool:
        return expected > 0 and self._if(key, expected, {"request_delete_range": {"key": self._key(key)}})

    def grant(self, ttl_s: int) -> int:
        return int(self._call("/v3/lease/grant", {"TTL": str(ttl_s), "ID": "0"})["ID"])

    def refresh(self, lease: int) -> bool:
        answer = self._call("/v3/lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", "0")) > 0

    def revoke(self, lease: int) -> None:
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease)})
        except _RefusedError as error:
            if error.code != 5:  # not found: it is over
                raise

    def wait(self, after: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            at = self._first
        watch = {"create_request": {**self._range(), "start_revision": str(after + 1)}}
        answers = False
        try:
            with self._request(self._endpoints[at], "/v3/watch", watch, deadline) as lines:
                for line in lines:
                    answers = True
                    result = _decode(line).get("result", {})
                    if result.get("events") or result.get("canceled"):  # canceled: too old a revision
                        return True
        except RegistryError:
            if not answers:
                self._next(at)
        # Not before its time: whoever waits in a loop must not spin on an etcd that is gone.
        time.sleep(max(0.0, min(self._try_timeout_s, deadline - time.monotonic())))
        return False

    # --- inside

    def _key(self, key: str) -> str:
        return b64encode((self._prefix + key).encode()).decode()

    def _range(self) -> Json:
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        return {"key": self._key(""), "range_end": b64encode(end.encode()).decode()}

    def _if(self, key: str, expected: int, then: Json) -> bool:
        compare = {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
        return bool(self._call("/v3/kv/txn", {"compare": [compare], "success": [then]}).get("succeeded", False))

    def _call(self, path: str, body: Json) -> Json:
        """Ask one endpoint after another until one answers."""
        with self._lock:
            first = self._first
        problem = ""
        for at in range(first, first + len(self._endpoints)):
            at %= len(self._endpoints)
            try:
                answer = self._ask(self._endpoints[at], path, body)
            except _RefusedError:
                raise
            except RegistryError as error:
                problem = str(error)
                self._next(at)
                continue
            return answer
        raise RegistryError(f"etcd can't be reached: {problem}")

    def _next(self, failed: int) -> None:
        with self._lock:
            if self._first == failed:
                self._first = (failed + 1) % len(self._endpoints)

    def _ask(self, endpoint: Endpoint, path: str, body: Json) -> Json:
        deadline = time.monotonic() + self._try_timeout_s
        try:
            return self._once(endpoint, path, body, deadline)
        except _RefusedError as error:
            if error.code != UNAUTHENTICATED or not self._user:
                raise
        self._token = ""
        return self._once(endpoint, path, body, deadline)

    def _once(self, endpoint: Endpoint, path: str, body: Json, deadline: float) -> Json:
        if self._user and not self._token:
            name = {"name": self._user, "password": self._password}
            with self._request(endpoint, "/v3/auth/authenticate", name, deadline) as lines:
                self._token = str(_decode(b"".join(lines)).get("token", ""))
        with self._request(endpoint, path, body, deadline) as lines:
            return _decode(b"".join(lines))

    @contextmanager
    def _request(self, endpoint: Endpoint, path: str, body: Json, deadline: float) -> Iterator[Iterator[bytes]]:
        """The lines of the answer, as they come. Raises `RegistryError`."""
        left = min(self._try_timeout_s, deadline - time.monotonic())
        connection: http.client.HTTPConnection
        if endpoint.tls:
            connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=left, context=self._tls)
        else:
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=left)
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        try:
            if left <= 0:
                raise TimeoutError("no time is left")
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            lines = _lines(connection, response, deadline)
            if response.status != 200:
                raise _refused(endpoint, b"".join(lines), response.status)
            yield lines
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RegistryError(f"{endpoint}: {error or type(error).__name__}") from None
        finally:
            connection.close()


class _RefusedError(RegistryError):
    """etcd has answered, and does not do it. `code` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _lines(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
) -> Iterator[bytes]:
    """Whole lines, and what the answer ends with."""
    rest, size = b"", 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        if connection.sock is not None:  # an answer that is complete has let go of it
            connection.sock.settimeout(left)
        part = response.read1(READ_BYTES)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if not part:
            if rest:
                yield rest
            return
        *whole, rest = (rest + part).split(b"\n")
        yield from whole


def _decode(data: bytes) -> Json:
    try:
        decoded = json.loads(data)
    except ValueError:
        raise RegistryError(f"etcd answers what is no JSON: {data[:80]!r}") from None
    if not isinstance(decoded, dict):
        raise RegistryError(f"etcd answers what is no object: {data[:80]!r}")
    return decoded


def _refused(endpoint: Endpoint, body: bytes, status: int) -> RegistryError:
    """5xx and the like: another endpoint may do better. A plain no is the same everywhere."""
    try:
        answer = _decode(body)
    except RegistryError:
        answer = {}
    code = int(answer.get("code", 0))
    text = f"{endpoint} answers {status}: {answer.get('error') or answer.get('message') or 'no reason given'}"
    if status >= 500 or code in (0, 4, 8, 14):  # deadline, exhausted, unavailable
        return RegistryError(text)
    return _RefusedError(text, code)


def _revision(answer: Json) -> int:
    try:
        return int(answer["header"]["revision"])
    except (KeyError, TypeError, ValueError):
        raise RegistryError("etcd answers without a revision") from None
