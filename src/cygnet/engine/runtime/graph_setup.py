"""Whether and for which batches the engine gets CUDA graphs, what they take from the KV budget, and their capture."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cygnet.base.config import Config
from cygnet.base.errors import ConfigError
from cygnet.base.geometry import KVGeometry
from cygnet.base.units import format_bytes
from cygnet.engine.graph_buckets import Buckets, candidate_sizes, choose_buckets
from cygnet.engine.runtime.cuda_graphs import CudaGraphDevice, DecodeGraphs, GraphDevice, GroupLayout, estimate_memory
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes, min_pools
from cygnet.model.attention.backend import GraphAttentionBackend
from cygnet.model.decoder import HybridModel
from cygnet.model.description import GroupName, MoeSpec

AUTO_SHARE = 8
"""With `auto`, graphs get at most one part in so many of the KV budget."""
log = logging.getLogger("cygnet.engine")


@dataclass(frozen=True)
class GraphChoice:
    """Batch sizes to capture, and what they cost besides the KV pools."""

    buckets: Buckets
    graph_bytes: int = 0
    """Estimated."""
    scratch_bytes: int = 0
    """One block per group."""

    @property
    def num_bytes(self) -> int:
        """To be taken off the KV budget."""
        return self.graph_bytes + self.scratch_bytes


NO_GRAPHS = GraphChoice(Buckets(()))


def default_graph_device(device: torch.device) -> GraphDevice | None:
    """What captures steps on a torch device; `None` where nothing does."""
    return CudaGraphDevice(device) if device.type == "cuda" else None


def obstacle(model: HybridModel) -> str | None:
    """Why the model's decode steps can't be captured; `None` if they can."""
    if not isinstance(model.attention_backend, GraphAttentionBackend):
        return "this attention backend makes a new plan for every step"
    for layer in model.description.layers:
        if isinstance(layer.mlp, MoeSpec) and not model.ops.fuses_experts(layer.mlp):
            return "these step kernels run experts in plain code, which waits for the GPU"
    return None


def choose_graphs(
    config: Config, model: HybridModel, geometry: KVGeometry, budget_bytes: int, device: GraphDevice | None
) -> GraphChoice:
    """What `engine.cuda_graphs` means for a model and a KV budget, from which the choice is to be taken off.

    `auto` leaves the pools what they need at least. Raises `ConfigError` where graphs are asked for and can't be had.
    """
    wanted, most = config.engine.cuda_graphs, config.engine.max_num_seqs
    if wanted == "off":
        return NO_GRAPHS
    hindrance = "the model is not on a GPU" if device is None else obstacle(model)
    if hindrance is not None:
        if wanted == "auto":
            return NO_GRAPHS
        raise ConfigError(f"engine.cuda_graphs = {_written(wanted)}, but {hindrance}; use 'auto'")
    size = config.kv.block_size
    length = min(
        config.model.max_model_len or model.description.max_model_len, budget_bytes // geometry.full.token_bytes
    )
    memory = estimate_memory(
        model.description, model.dtype.itemsize, table_blocks=-(-length // size) + _swa_table(geometry, size)
    )
    scratch = geometry.full.block_bytes(size) + geometry.swa.block_bytes(size)
    least = min_pools(
        geometry,
        block_size=size,
        chunk=config.engine.max_num_batched_tokens,
        model_max_len=model.description.max_model_len,
        max_model_len=config.model.max_model_len,
    ).num_bytes
    room = budget_bytes - least - scratch
    if wanted == "auto":
        buckets = choose_buckets(most, memory, min(budget_bytes // AUTO_SHARE, room))
        return GraphChoice(buckets, memory.total(buckets.sizes), scratch) if buckets.sizes else NO_GRAPHS
    sizes = candidate_sizes(most) if wanted == "on" else tuple(sorted(set(wanted)))
    if sizes and sizes[-1] > most:
        raise ConfigError(
            f"engine.cuda_graphs = {_written(wanted)}: no step has more than engine.max_num_seqs = {most} requests"
        )
    if not sizes:
        return NO_GRAPHS
    if memory.total(sizes) > room:
        raise ConfigError(
            f"KV budget {format_bytes(budget_bytes)} is below the minimum of {format_bytes(least)} and "
            f"{format_bytes(memory.total(sizes) + scratch)} for CUDA graphs of up to {sizes[-1]} requests; "
            "raise --kv-cache-memory, or use engine.cuda_graphs = 'auto'"
        )
    return GraphChoice(Buckets(sizes), memory.total(sizes), scratch)


def capture_graphs(
    choice: GraphChoice,
    model: HybridModel,
    pool: DevicePool,
    geometry: KVGeometry,
    sizes: PoolSizes,
    device: GraphDevice,
    progress: Callable[[int, int], None],
) -> DecodeGraphs:
    """The chosen graphs, over a pool with scratch blocks. Says in the log what was captured and how long it took."""
    assert isinstance(model.attention_backend, GraphAttentionBackend)
    assert pool.scratch_full is not None
    assert pool.scratch_swa is not None
    size = sizes.block_size
    groups: dict[GroupName, GroupLayout] = {
        "full": GroupLayout(pool.full, -(-sizes.max_model_len // size), pool.scratch_full)
    }
    if geometry.has_swa:
        groups["swa"] = GroupLayout(pool.swa, _swa_table(geometry, size), pool.scratch_swa)
    before, started = _used_bytes(model.device), time.monotonic()
    graphs = DecodeGraphs(
        model,
        model.attention_backend,
        device,
        choice.buckets,
        block_size=size,
        groups=groups,
        progress=progress,
    )
    log.info(
        "captured decode steps as %d CUDA graphs in %.1f s: batches of %s; they take %s, expected were %s",
        len(choice.buckets.sizes),
        time.monotonic() - started,
        ", ".join(map(str, choice.buckets.sizes)),
        format_bytes(_used_bytes(model.device) - before),
        format_bytes(choice.graph_bytes),
    )
    return graphs


def _swa_table(geometry: KVGeometry, block_size: int) -> int:
    """Blocks that a decode reads in the SWA group, at most: window and query, neither aligned to blocks."""
    return geometry.window_blocks(block_size) + 2 if geometry.has_swa else 0


def _used_bytes(device: torch.device) -> int:
    """Device memory in use, by anybody; 0 where torch does not say."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _written(wanted: str | tuple[int, ...]) -> str:
    return repr(wanted) if isinstance(wanted, str) else str(list(wanted))
