"""All settings of `cygnet router`: frozen, nested, documented per field, resolved as those of `cygnet serve`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from cygnet.base import settings
from cygnet.base.errors import ConfigError
from cygnet.router.buckets import parse_buckets
from cygnet.router.policies import POLICIES
from cygnet.router.view import WorkerRecord


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The side of the callers."""

    host: Annotated[str, Meta(description="address to listen on; the default is this machine only")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8080
    max_connections: Annotated[int, Meta(ge=1, description="most open connections of callers")] = 20_000
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 64 << 20
    max_buffered_bytes: Annotated[
        int, Meta(ge=1024, description="request bodies held at once, all together; beyond that callers get 503")
    ] = 2 << 30
    max_head_bytes: Annotated[int, Meta(ge=1024, description="largest request line and headers")] = 64 << 10
    max_headers: Annotated[int, Meta(ge=8, description="most request headers")] = 200
    receive_s: Annotated[float, Meta(gt=0, description="seconds that a request may take to arrive")] = 120.0
    idle_s: Annotated[float, Meta(gt=0, description="seconds that a connection may stay without a request")] = 300.0
    stall_s: Annotated[float, Meta(gt=0, description="seconds that a caller may leave its answer unread")] = 300.0
    drain_s: Annotated[float, Meta(ge=0, description="seconds that SIGTERM waits for running requests")] = 30.0
    access_log: Annotated[bool, Meta(description="one line per request on standard error (never its text)")] = True


class WorkersSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The side of the workers."""

    urls: Annotated[
        tuple[str, ...], Meta(description="workers: http://host:port, or group=http://host:port for a length bucket")
    ] = ()
    api_key: Annotated[str, Meta(description="key that workers ask for (better: CYGNET_WORKER_API_KEY)")] = ""
    connect_s: Annotated[float, Meta(gt=0, description="seconds to connect")] = 2.0
    first_byte_s: Annotated[float, Meta(gt=0, description="seconds to the first byte of an answer")] = 600.0
    between_bytes_s: Annotated[float, Meta(gt=0, description="seconds between bytes of an answer")] = 300.0
    idle_s: Annotated[float, Meta(gt=0, description="seconds that an idle connection to a worker is kept")] = 30.0
    max_attempts: Annotated[int, Meta(ge=1, le=10, description="workers tried before the first byte of an answer")] = 3
    health_path: Annotated[str, Meta(description="path that answers 200 when a worker can serve")] = "/health"
    probe_s: Annotated[float, Meta(gt=0, description="seconds between health probes")] = 5.0
    probe_timeout_s: Annotated[float, Meta(gt=0, description="seconds a probe may take")] = 3.0
    probe_failures: Annotated[int, Meta(ge=1, description="failed probes in a row that mark a worker down")] = 3
    probe_successes: Annotated[int, Meta(ge=1, description="good probes in a row that mark it up again")] = 2
    breaker_failures: Annotated[int, Meta(ge=1, description="failed requests in a row that open the breaker")] = 5
    breaker_open_s: Annotated[float, Meta(gt=0, description="seconds the breaker stays open, doubling to 60")] = 5.0


class RoutingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which worker gets a request."""

    policy: Annotated[
        str,
        Meta(description="cache_aware, least_loaded, power_of_two, round_robin, consistent_hash or session"),
    ] = "cache_aware"
    match_weight: Annotated[
        float, Meta(ge=0, description="worth of a full prefix match, in units of normalised load")
    ] = 1.5
    load_floor_tokens: Annotated[int, Meta(ge=1, description="pending tokens below which load hardly counts")] = 8192
    request_tokens: Annotated[int, Meta(ge=1, description="load of a running request beside its prefill")] = 64
    worker_budget_tokens: Annotated[
        int, Meta(ge=0, description="pending tokens per worker beyond which requests wait in the router; 0: no limit")
    ] = 0
    buckets: Annotated[
        tuple[str, ...], Meta(description="length buckets, such as short=0-64K; a worker's group names its bucket")
    ] = ()
    bucket_by: Annotated[str, Meta(pattern="^(uncached|total)$", description="length meant: uncached or total")] = (
        "uncached"
    )
    spill: Annotated[bool, Meta(description="take a worker of another bucket when the right ones have no room")] = True
    session_header: Annotated[str, Meta(description="header that names a session")] = "x-session-id"


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the router remembers of prefixes. All instances of a fleet need the same."""

    block_bytes: Annotated[int, Meta(ge=64, le=65536, description="text per block of the index")] = 2048
    bytes_per_token: Annotated[float, Meta(ge=1, le=16, description="for estimates of lengths in tokens")] = 4.0
    ttl_s: Annotated[float, Meta(ge=1, description="seconds that an unused prefix is remembered")] = 7200.0
    max_entries: Annotated[int, Meta(ge=4096, description="most prefixes remembered (in-process state)")] = 1_000_000
    kv_events: Annotated[
        bool, Meta(description="follow what workers tell of their caches, where they do (Cygnet: /kv/events)")
    ] = True
    volatile_header: Annotated[
        str, Meta(description="regular expression for what to ignore at the start of a system prompt, such as a date")
    ] = ""


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that wait until a worker is below its budget."""

    max_waiting: Annotated[int, Meta(ge=1, description="waiting requests before new ones get 429")] = 1024
    max_wait_s: Annotated[float, Meta(gt=0, description="longest wait, then 503")] = 60.0
    late_s: Annotated[
        float,
        Meta(gt=0, description="wait after which a request goes before all others, to any worker below its budget"),
    ] = 30.0
    ageing_tokens_per_s: Annotated[
        int, Meta(ge=0, description="uncached tokens that one second of waiting makes up for")
    ] = 2000
    priority_tokens: Annotated[
        int, Meta(ge=0, description="uncached tokens that one step of the body's priority field makes up for")
    ] = 16384


class AuthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask."""

    api_keys: Annotated[
        tuple[str, ...], Meta(description="keys of callers; none: anyone (better: CYGNET_API_KEY, commas between)")
    ] = ()
    admin_key: Annotated[
        str, Meta(description="key for changing /workers; empty: any caller's (better: CYGNET_ADMIN_KEY)")
    ] = ""
    max_in_flight: Annotated[int, Meta(ge=0, description="running requests per key; 0: no limit")] = 0
    requests_per_minute: Annotated[int, Meta(ge=0, description="requests per key and minute; 0: no limit")] = 0
    isolate: Annotated[bool, Meta(description="keys do not share prefixes (for workers that salt per key)")] = False


class RedisSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that several routers share."""

    url: Annotated[str, Meta(description="redis://[user:password@]host:port[/db]; empty: state in this process")] = ""
    namespace: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$", description="prefix of all keys")] = "cygnet"
    timeout_ms: Annotated[int, Meta(ge=1, description="longest wait for Redis before a request is placed without")] = 30
    lease_s: Annotated[float, Meta(ge=2, description="seconds after which a dead router's load is taken back")] = 30.0


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans for OpenTelemetry. Needs the extra `otel`."""

    otlp_endpoint: Annotated[
        str, Meta(description="where spans go, such as http://127.0.0.1:4318/v1/traces; empty: no tracing")
    ] = ""
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1, description="part of the requests that are traced; a caller's traceparent goes before")
    ] = 1.0
    service_name: Annotated[str, Meta(min_length=1, description="service.name of the spans")] = "cygnet-router"
    export_timeout_s: Annotated[float, Meta(gt=0, description="seconds that sending spans may take")] = 5.0


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `cygnet router` can be told. TOML sections have the same names as these fields."""

    server: ServerSettings = ServerSettings()
    workers: WorkersSettings = WorkersSettings()
    routing: RoutingSettings = RoutingSettings()
    cache: CacheSettings = CacheSettings()
    queue: QueueSettings = QueueSettings()
    auth: AuthSettings = AuthSettings()
    redis: RedisSettings = RedisSettings()
    tracing: TracingSettings = TracingSettings()


SECRET_PATHS = frozenset({"workers.api_key", "auth.api_keys", "auth.admin_key", "redis.url"})
"""Settings whose values are never printed."""


def resolve(
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[RouterConfig, dict[str, str]]:
    """The config, and where each value came from. Weakest first: file, environment (secrets), `sets`, `options`.

    Raises `ConfigError` for an unreadable file, an unknown path, or a value of the wrong type, range or form.
    """
    env = environment or {}
    secrets = {
        "workers.api_key": ("CYGNET_WORKER_API_KEY", env.get("CYGNET_WORKER_API_KEY", "")),
        "auth.admin_key": ("CYGNET_ADMIN_KEY", env.get("CYGNET_ADMIN_KEY", "")),
        "redis.url": ("CYGNET_REDIS_URL", env.get("CYGNET_REDIS_URL", "")),
    }
    given = {**(options or {})}
    config, sources = settings.lay_over(
        RouterConfig, file=file, secrets=secrets, sets=sets, options=given, secret_paths=SECRET_PATHS
    )
    keys = tuple(key.strip() for key in env.get("CYGNET_API_KEY", "").split(",") if key.strip())
    if keys and sources["auth.api_keys"] in ("default", f"file {file}"):
        config = msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, api_keys=keys))
        sources["auth.api_keys"] = "env CYGNET_API_KEY"
    check(config)
    return config, sources


def check(config: RouterConfig) -> None:
    """Raise `ConfigError` for values that are well-typed and make no sense."""
    POLICIES.get(config.routing.policy)
    limits = parse_buckets(config.routing.buckets)
    for text in config.workers.urls:
        record = parse_worker(text)
        if record.group and record.group not in limits:
            raise ConfigError(
                f"worker {text!r} is of group {record.group!r}, which is no length bucket; give it in routing.buckets"
            )
    if len(set(config.workers.urls)) != len(config.workers.urls):
        raise ConfigError("a worker is given twice in workers.urls")
    if config.cache.volatile_header:
        try:
            re.compile(config.cache.volatile_header)
        except re.error as error:
            raise ConfigError(f"cache.volatile_header is not a regular expression: {error}") from None
    if "@" in urlsplit(config.tracing.otlp_endpoint).netloc:
        raise ConfigError("tracing.otlp_endpoint must not carry a user or password: it is shown and logged")
    if config.tracing.otlp_endpoint and urlsplit(config.tracing.otlp_endpoint).scheme not in ("http", "https"):
        raise ConfigError("tracing.otlp_endpoint must begin with http:// or https://")
    if config.redis.url and urlsplit(config.redis.url).scheme not in ("redis", "unix"):
        raise ConfigError("redis.url must begin with redis:// or unix://")


def parse_worker(text: str) -> WorkerRecord:
    """`http://host:port` or `group=http://host:port`."""
    head, eq, rest = text.partition("=")
    group, url = (head, rest) if eq and "://" not in head else ("", text)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"worker {text!r}: write http://host:port, without a path") from None
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(f"worker {text!r}: write http://host:port, without a path")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"worker {text!r}: write http://host:port only; the path comes from each request")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return WorkerRecord(url=f"http://{host}:{port}", group=group)
