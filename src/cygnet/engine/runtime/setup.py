"""From a config to an engine that is ready to step: device, dtype, weights, pools, core, runner."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from cygnet.base.config import Config, check_memory, check_weight_cache
from cygnet.base.errors import ConfigError
from cygnet.base.geometry import KVGeometry
from cygnet.base.messages import EngineReady
from cygnet.base.threads import usable_cpus
from cygnet.base.units import format_bytes
from cygnet.engine.core import EngineCore
from cygnet.engine.runtime.cuda_graphs import GraphDevice
from cygnet.engine.runtime.graph_setup import capture_graphs, choose_graphs, default_graph_device
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.model_runner import Forward, ModelRunner
from cygnet.engine.runtime.tier_setup import describe_tiers, plan_lower, start_tiers
from cygnet.engine.runtime.waker import Waker
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.inspect import tiers_of
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes, plan_pools
from cygnet.model.cache_dir import default_cache_dir, weights_folder
from cygnet.model.cpu.kernels import SUFFIX, prepare
from cygnet.model.decoder import HybridModel
from cygnet.model.int8 import compiled
from cygnet.model.loader import build_model
from cygnet.model.source import ModelSource, find_model
from cygnet.model.weight_cache import WeightCache
from cygnet.model.weights_digest import weights_digest

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total) while loading; a total of 0 means unknown."""


def choose_device(name: str) -> torch.device:
    """The torch device that `model.device` means on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device = {name!r} is no torch device; write auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device = {name!r}, but torch sees no GPU here; use --device cpu, or see `cygnet doctor`"
        )
    return device


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has bf16 arithmetic. oneDNN says it supports bf16 where it emulates it, at a quarter of fp32's
    speed (x86 with AVX-512 alone)."""
    known = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    if platform.machine().lower() in ("x86_64", "amd64") and None not in known:
        return any(tell() for tell in known if tell is not None)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `model.dtype` means: `auto` is bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bf16()
        name = "bfloat16" if fast else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


@dataclass(frozen=True)
class WeightKinds:
    """What a model computes in (and keeps KV in), and how its matrices are kept."""

    dtype: torch.dtype
    matrices: torch.dtype
    """As `dtype`, or bf16 beside fp32."""
    int8: bool


def choose_weights(config: Config, device: torch.device) -> WeightKinds:
    """What `model.dtype` and `model.weight_dtype` mean on a device.

    On a CPU without bf16 arithmetic, bf16 matrices are multiplied in fp32; so are those that `auto` would otherwise
    double the size of.
    """
    weights, name = config.model.weight_dtype, config.model.dtype
    cpu = device.type == "cpu"
    if weights == "int8":
        if not cpu:
            raise ConfigError("model.weight_dtype = 'int8' is for CPUs; with a GPU use auto")
        dtype = choose_dtype(name, device)
        return WeightKinds(dtype, dtype, True)
    if name == "auto" and (weights == "float32" or (weights == "bfloat16" and not cpu)):
        name = weights
    dtype = choose_dtype(name, device)
    half = cpu and dtype == torch.float32 and compiled(dtype)
    if half and (weights == "bfloat16" or weights == name == "auto"):
        return WeightKinds(dtype, torch.bfloat16, False)
    if weights not in ("auto", str(dtype).removeprefix("torch.")):
        why = " (which takes a CPU, and numba)" if dtype == torch.float32 else ""
        raise ConfigError(
            f"model.weight_dtype = {weights!r} and model.dtype = {name!r} don't go together{why}; set one of them, or "
            "both alike"
        )
    return WeightKinds(dtype, dtype, False)


def choose_kv_dtype(config: Config, model: HybridModel) -> torch.dtype:
    """The dtype that `kv.dtype` means for a model: its own, or bf16 beside fp32 on a CPU.

    `auto` takes bf16 there if nobody asked for fp32: it halves what a token takes, and is what GPUs keep.
    """
    name, half = config.kv.dtype, model.device.type == "cpu" and model.dtype == torch.float32
    if name == "auto":
        asked = config.model.dtype != "auto" or model.weight_dtype == torch.float32
        return torch.bfloat16 if half and not asked else model.dtype
    own = str(model.dtype).removeprefix("torch.")
    if name != own and not (half and name == "bfloat16"):
        raise ConfigError(f"kv.dtype = {name!r} does not go with a model in {own} here; use auto or {own}")
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def free_memory(device: torch.device) -> int:
    """Bytes free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def kv_budget(config: Config, device: torch.device) -> int:
    """Bytes that `kv.memory` means, once the weights are loaded."""
    memory = check_memory(config.kv.memory)
    return memory if isinstance(memory, int) else int(memory * free_memory(device))


def size_pools(config: Config, geometry: KVGeometry, *, model_max_len: int, budget_bytes: int) -> PoolSizes:
    """Both pools from a budget. Raises `ConfigError` below the minimum."""
    return plan_pools(
        geometry,
        block_size=config.kv.block_size,
        budget_bytes=budget_bytes,
        chunk=config.engine.max_num_batched_tokens,
        model_max_len=model_max_len,
        max_model_len=config.model.max_model_len,
        swa_share=config.kv.swa_share,
        session_tokens=config.kv.session_tokens,
        windows_per_session=config.kv.windows_per_session,
    )


def assemble(
    config: Config,
    model: HybridModel,
    *,
    name: str,
    weights: str = "",
    eos_token_ids: Sequence[int] = (),
    graph_device: GraphDevice | None = None,
    report: Report = lambda stage, done, total: None,
) -> LocalEngine:
    """Pools, tiers, core, CUDA graphs and runner around a loaded model. `weights` (a digest), or else `name`, tells
    models apart in cache keys; `graph_device` stands in for the one of the model's device."""
    description = model.description
    kv_dtype = choose_kv_dtype(config, model)
    geometry = description.kv_geometry(kv_dtype.itemsize)
    graph_device = graph_device or default_graph_device(model.device)
    budget = kv_budget(config, model.device)
    choice = choose_graphs(config, model, geometry, budget, graph_device)
    sizes = size_pools(
        config, geometry, model_max_len=description.max_model_len, budget_bytes=budget - choice.num_bytes
    )
    dtype = f"{model.dtype}/{model.weight_dtype}" + ("" if kv_dtype == model.dtype else f"/{kv_dtype}")
    fingerprint = f"{weights or name}/{description.family}/{dtype}/{sizes.block_size}"
    lower = plan_lower(config, geometry, model.device, budget, fingerprint=fingerprint, dtype=dtype)
    kv = KVManager(
        geometry,
        sizes,
        KVPolicy(
            prefix_cache=config.kv.prefix_cache,
            rebuild=config.kv.rebuild,
            retention=config.kv.retention,
            eviction=config.kv.eviction,
            track_freed=config.kv.poison,
        ),
        lower=lower,
    )
    policy = SchedulerPolicy(
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        ageing_tokens_per_s=config.engine.ageing_tokens_per_s,
        share_in_flight=config.engine.share_in_flight,
    )
    core = EngineCore(
        kv,
        policy,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
        vocab_size=description.vocab_size,
        max_requests=config.engine.max_requests,
    )
    poison, graphed = config.kv.poison, bool(choice.buckets.sizes)
    pool = DevicePool(geometry, sizes, dtype=kv_dtype, device=model.device, poison=poison, scratch=graphed)
    forward: Forward = model
    if graph_device is not None and graphed:
        progress = partial(report, "capturing CUDA graphs")
        forward = capture_graphs(choice, model, pool, geometry, sizes, graph_device, progress)
    waker = Waker()
    tiers = None
    if lower is not None:
        tiers = start_tiers(config, lower, geometry, pool, description, kv_dtype, model.device, waker.wake)
    runner = ModelRunner(
        model,
        pool,
        window=geometry.window,
        eos_token_ids=eos_token_ids,
        forward=forward,
        transfers=tiers.transfers if tiers is not None else None,
    )
    return LocalEngine(core, runner, audit=config.engine.audit, tiers=tiers, waker=waker)


def weight_cache(config: Config, source: ModelSource, report: Report) -> WeightCache | None:
    """Where `model.weight_cache` wants the weights kept, if anywhere."""
    limit = check_weight_cache(config.model.weight_cache)
    if limit == 0:
        return None
    folder = weights_folder(source.cache_dir or default_cache_dir(), limit=limit)
    return WeightCache(folder, progress=lambda done, total: report("keeping the weights", done, total))


def load_engine(
    config: Config,
    *,
    eos_token_ids: Sequence[int] = (),
    source: ModelSource | None = None,
    report: Report = lambda stage, done, total: None,
) -> tuple[LocalEngine, EngineReady]:
    """Load the configured model and make its engine.

    Raises `ConfigError` or `ModelLoadError` with the remedy.
    """
    device = choose_device(config.model.device)
    kinds = choose_weights(config, device)
    dtype = kinds.dtype
    if device.type == "cpu":
        torch.set_num_threads(config.engine.num_threads or usable_cpus())
    report("finding the model", 0, 0)
    source = source or find_model(config.model.model)
    model = build_model(
        source.checkpoint(dtype=dtype),
        dtype=dtype,
        weight_dtype=kinds.matrices,
        device=device,
        attention_backend=config.engine.attention_backend,
        step_kernels=config.engine.step_kernels,
        pack_tied_head=config.model.pack_tied_head,
        int8=kinds.int8,
        cache=weight_cache(config, source, report),
        progress=lambda done, total: report("loading weights", done, total),
    )
    if model.ops.is_compiled and dtype in SUFFIX:
        compiling = partial(report, "compiling kernels")
        prepare(dtype, compiling, kv_dtype=choose_kv_dtype(config, model))
    # Only a store outlives the process, or is shared: within it a name is enough.
    weights = weights_digest(source.path) if config.kv.store else ""
    engine = assemble(config, model, name=source.name, weights=weights, eos_token_ids=eos_token_ids, report=report)
    return engine, describe(engine, model, source.name, store=config.kv.store)


def describe(engine: LocalEngine, model: HybridModel, name: str, *, store: str = "") -> EngineReady:
    """What the engine says of itself once it is ready."""
    kv, sizes = engine.core.kv, engine.core.kv.sizes
    stats = engine.core.stats()
    swa_layers = kv.geometry.swa.num_layers
    dtype, matrices = (str(each).removeprefix("torch.") for each in (model.dtype, model.weight_dtype))
    if matrices != dtype:
        dtype += f" with matrices in {matrices}"
    if kv.geometry.full.dtype_bytes != model.dtype.itemsize:
        dtype += ", KV in bfloat16"
    shape = f"{kv.geometry.full.num_layers} full-attention" + (
        f" + {swa_layers} sliding-window layers (window {kv.geometry.window})" if swa_layers else " layers"
    )
    pools = f"full pool {sizes.full_blocks * sizes.block_size} tokens"
    if swa_layers:
        windows = sizes.swa_blocks // max(1, kv.tree.window_blocks)
        pools += f", SWA pool {sizes.swa_blocks * sizes.block_size} tokens ({windows} windows)"
    return EngineReady(
        max_model_len=sizes.max_model_len,
        vocab_size=model.description.vocab_size,
        max_requests=engine.core.max_requests,
        block_size=sizes.block_size,
        geometry=kv.geometry,
        stats=stats,
        tiers=tiers_of(kv),
        rebuild=kv.policy.rebuild,
        summary=f"{name}, {dtype} on {model.device}: {shape}\n"
        f"KV cache {format_bytes(sizes.num_bytes(kv.geometry))}: {pools}; context up to {sizes.max_model_len} tokens"
        + describe_tiers(kv, store),
    )
