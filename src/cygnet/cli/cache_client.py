"""What a running Cygnet server says of its cache."""

from typing import TypeVar

import httpx
import msgspec

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.cli.chat_client import ServerError, refusal

T = TypeVar("T")


class _Flushed(msgspec.Struct):
    dropped: FlushReport


class CacheClient:
    """One server. Its methods raise `ServerError`."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{url!r} is not an address: {error}") from None

    def __enter__(self) -> "CacheClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def inspect(self, limit: int) -> CacheReport:
        """What is cached where."""
        return self._ask("GET", "/cache", {"limit": str(limit)}, CacheReport)

    def flush(self, *, store: bool) -> FlushReport:
        """Drop what is cached; what that was."""
        return self._ask("POST", "/reset_prefix_cache", {"store": "true"} if store else {}, _Flushed).dropped

    def _ask(self, method: str, path: str, query: dict[str, str], schema: type[T]) -> T:
        try:
            response = self._http.request(method, path, params=query)
        except httpx.HTTPError as error:
            what = error or type(error).__name__
            raise ServerError(f"no answer from {self.url} ({what}); start a server with `cygnet serve`") from None
        if response.status_code == 404:
            raise ServerError(f"{self.url} has no {path}: it is no Cygnet server, or an older one")
        if response.status_code != 200:
            raise refusal(response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=schema)
        except msgspec.DecodeError as error:
            message = f"{self.url}{path} is not what this version of Cygnet answers ({error}); are both of one version?"
            raise ServerError(message) from None
