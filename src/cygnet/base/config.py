"""All settings of an engine and its API server: frozen, nested, documented per field.

`resolve` is pure: it lays a TOML document, `--set a.b=c` overrides and CLI values over the defaults and says where each
value came from. An unknown key is an error that names the nearest match. There is no global config.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cygnet.base import settings
from cygnet.base.errors import ConfigError
from cygnet.base.units import parse_bytes


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and how its weights are kept."""

    model: Annotated[
        str, Meta(description="gemma3-270m, smollm2-135m-instruct, a .gguf file, a Hugging Face folder, or a hub id")
    ] = "gemma3-270m"
    served_name: Annotated[str, Meta(description="name in the API; empty: derived from model")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(description="what is computed in; auto: bfloat16 where the hardware multiplies it, else float32"),
    ] = "auto"
    weight_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8"],
        Meta(
            description="how matrices are kept; auto: in dtype, or in bfloat16 where dtype is auto and float32 is what "
            "that means; int8: a byte per weight, faster on CPUs, less exact"
        ),
    ] = "auto"
    device: Annotated[str, Meta(description="torch device: auto, cpu, cuda, cuda:1")] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest prompt + answer in tokens; 0: the model's, or what the KV budget holds")
    ] = 0
    pack_tied_head: Annotated[
        bool,
        Meta(
            description="on CPUs keep copies of an LM head tied to the embedding, packed and in bytes (with int8 "
            "weights, packed copies of all matrices): more memory, faster"
        ),
    ] = True
    weight_cache: Annotated[
        str,
        Meta(
            description="disk for weights that were dequantised, which later starts map: a size such as "
            "50GiB; off; auto: a tenth of the free disk, 20GiB at most"
        ),
    ] = "auto"
    chat_template: Annotated[str, Meta(description="file with a Jinja chat template; empty: the model's own")] = ""


class KVSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two KV pools and the prefix tree over them."""

    memory: Annotated[
        str, Meta(description="KV budget: a size such as 2GiB, or a fraction of the free memory such as 0.3")
    ] = "0.25"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(
            description="what KV is kept in; auto: as model.dtype, or bfloat16 where that is auto and means float32 "
            "(unless model.weight_dtype is float32)"
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per block")] = 16
    swa_share: Annotated[
        float,
        Meta(
            ge=0.0,
            lt=1.0,
            description="the SWA pool's part of what one step leaves of the budget; 0: from session_tokens",
        ),
    ] = 0.0
    session_tokens: Annotated[
        int, Meta(ge=1, description="typical length of a cached session, from which the SWA pool's share is derived")
    ] = 8192
    windows_per_session: Annotated[
        int, Meta(ge=1, description="windows kept per typical session, for the SWA pool's share")
    ] = 2
    prefix_cache: Annotated[bool, Meta(description="reuse KV between requests")] = True
    rebuild: Annotated[bool, Meta(description="allow exact rebuild of a lost SWA window from full KV")] = True
    retention: Annotated[tuple[str, ...], Meta(description="rules that say which SWA windows stay cached")] = (
        "prompt_end",
        "response_end",
        "branch",
        "geometric",
        "message",
    )
    eviction: Annotated[str, Meta(description="eviction policy: value or lru")] = "value"
    host_cache: Annotated[
        str,
        Meta(
            description="host memory for KV that the device has no room for: a size such as 8GiB; off; auto: twice "
            "kv.memory with a GPU, as much with a store, else off, and never more than a quarter of the free memory"
        ),
    ] = "auto"
    store: Annotated[
        str,
        Meta(description="store below the host cache: a folder with its limit, such as /data/kv:20GiB; empty: none"),
    ] = ""
    write_policy: Annotated[
        Literal["through", "selective", "back"],
        Meta(description="KV goes down a tier as soon as computed; once it was reused; or when it is evicted"),
    ] = "through"
    write_hits: Annotated[int, Meta(ge=1, description="reuses after which the selective policy writes")] = 1
    store_wait: Annotated[
        Literal["best_effort", "timeout", "wait"],
        Meta(description="a request waits for KV from the store: never; as long as store_timeout_ms says; to the end"),
    ] = "timeout"
    store_timeout_ms: Annotated[int, Meta(ge=0, description="longest wait for the store, whatever it has")] = 200
    store_timeout_ms_per_1k: Annotated[
        int, Meta(ge=0, description="added to store_timeout_ms per 1,024 uncached prompt tokens")
    ] = 50
    store_keep_alive_s: Annotated[
        int, Meta(ge=1, description="KV hot in a faster tier is refreshed in the store after so long")
    ] = 300
    poison: Annotated[bool, Meta(description="fill freed blocks with NaN (tests and debugging)")] = False


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler and the step."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="most requests running at once")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, description="token budget of one step; also the largest prefill chunk")
    ] = 1024
    max_waiting: Annotated[int, Meta(ge=1, description="waiting requests before new ones get 429")] = 512
    ageing_tokens_per_s: Annotated[
        int, Meta(ge=0, description="uncached tokens that one second of waiting makes up for, in the queue's order")
    ] = 1000
    share_in_flight: Annotated[
        bool, Meta(description="let a request wait for another that is computing the same prefix right now")
    ] = True
    attention_backend: Annotated[str, Meta(description="attention kernels: auto, or a registered name")] = "auto"
    step_kernels: Annotated[
        str, Meta(description="norms, rotation, activations: auto, or a registered name (torch, numba)")
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["auto", "on", "off"] | tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            description="decode steps replayed as CUDA graphs, which take part of kv.memory: auto (on a GPU whose "
            "kernels allow it; an eighth at most), on, off, or the batch sizes to capture, such as [1, 8, 64]"
        ),
    ] = "auto"
    num_threads: Annotated[int, Meta(ge=0, description="compute threads; 0: the CPUs this process may use")] = 0
    audit: Annotated[
        Literal["off", "idle", "step"], Meta(description="when to re-check the bookkeeping from scratch")
    ] = "idle"

    @property
    def max_requests(self) -> int:
        """Most requests running and waiting at once."""
        return self.max_num_seqs + self.max_waiting


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="address to listen on; the default is this machine only")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    api_key: Annotated[str, Meta(description="require this key (better: CYGNET_API_KEY)")] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 16 << 20
    drain_s: Annotated[float, Meta(ge=0, description="seconds that SIGTERM waits for running requests")] = 30.0
    cors_origins: Annotated[tuple[str, ...], Meta(description="origins allowed by CORS; none by default")] = ()
    log_requests: Annotated[bool, Meta(description="one log line per request (never its text)")] = True


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `cygnet serve` can be told. TOML sections have the same names as these fields."""

    model: ModelSettings = ModelSettings()
    kv: KVSettings = KVSettings()
    engine: EngineSettings = EngineSettings()
    api: ApiSettings = ApiSettings()


SECRET_PATHS = frozenset({"api.api_key"})
"""Settings whose values are never printed."""


class ResolvedConfig(msgspec.Struct, frozen=True):
    """A config and, per dotted path, the layer its value came from: `default`, a file, `--set`, an option, ..."""

    config: Config
    sources: dict[str, str]


def field_docs() -> dict[str, str]:
    """Description of every setting by dotted path."""
    return settings.field_docs(Config)


def resolve(
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Lay the layers over the defaults, weakest first: file, environment (secrets only), `sets`, `options`.

    `sets` are `path=value` strings; `options` maps dotted paths to values, `None` meaning "not given".
    Raises `ConfigError` for an unreadable file, an unknown path or a value of the wrong type or range.
    """
    secrets = {"api.api_key": ("CYGNET_API_KEY", (environment or {}).get("CYGNET_API_KEY", ""))}
    config, sources = settings.lay_over(
        Config, file=file, secrets=secrets, sets=sets, options=options, secret_paths=SECRET_PATHS
    )
    check_memory(config.kv.memory)
    check_host_cache(config.kv.host_cache, config.kv.store)
    check_weight_cache(config.model.weight_cache)
    return ResolvedConfig(config, sources)


def check_memory(text: str) -> int | float:
    """Read `kv.memory`: an `int` is bytes, a `float` below 1 a fraction of the free memory."""
    try:
        fraction = float(text)
    except ValueError:
        return parse_bytes(text)
    if 0.0 < fraction < 1.0:
        return fraction
    if fraction >= 1024:
        return int(fraction)
    raise ConfigError(f"kv.memory = {text!r}: write a size such as 2GiB, or a fraction between 0 and 1 of free memory")


def check_host_cache(text: str, store: str = "") -> int | None:
    """Read `kv.host_cache`: bytes, 0 for none, or `None` for what suits the machine."""
    if text == "auto":
        return None
    try:
        size = 0 if text == "off" else parse_bytes(text)
    except ConfigError:
        raise ConfigError(f"kv.host_cache = {text!r}: write auto, off, or a size such as 8GiB") from None
    if store and not size:
        raise ConfigError(f"a store ({store}) is reached through host memory; give --host-cache a size, or auto")
    return size


def check_weight_cache(text: str) -> int | None:
    """Read `model.weight_cache`: bytes, 0 for none, or `None` for as many as the disk suggests."""
    if text == "auto":
        return None
    try:
        return 0 if text == "off" else parse_bytes(text)
    except ConfigError:
        raise ConfigError(f"model.weight_cache = {text!r}: write auto, off, or a size such as 50GiB") from None
