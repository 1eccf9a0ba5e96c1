"""vLLM's KVCacheManager and hybrid coordinator for `prefix_cache.py`, in vLLM's environment. No model, no engine.

MiMo-V2.5-Pro as vLLM groups it: a group of 10 full layers and six of 10 sliding-window layers, with blocks of one size
out of one pool. Everything else is vLLM's default: `prefix_cache_retention_interval` 0 keeps sliding-window blocks
where the prompt ends and where prompts part.
"""

import sys
from pathlib import Path
from typing import Any

from worker import serve

sys.path.insert(0, str(Path(__file__).parent.parent))
from prefix_replay import Hit, replay
from prefix_traces import Request, load


class VllmCache:
    def __init__(self, budget_bytes: int, block: int, chunk: int, geometry: dict[str, int]) -> None:
        import torch
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.request import Request as VllmRequest

        self._request, self._params = VllmRequest, SamplingParams(max_tokens=1 << 20)
        layers = geometry["full_layers"]
        shape: dict[str, Any] = {
            "block_size": block,
            "num_kv_heads": geometry["num_kv_heads"],
            "head_size": geometry["key_dim"],
            "head_size_v": geometry["value_dim"],
            "dtype": torch.bfloat16,
        }
        full = FullAttentionSpec(**shape)
        window = SlidingWindowSpec(**shape, sliding_window=geometry["window"])
        groups = [KVCacheGroupSpec([f"full.{i}" for i in range(layers)], full)]
        for first in range(0, geometry["swa_layers"], layers):
            groups.append(KVCacheGroupSpec([f"swa.{i}" for i in range(first, first + layers)], window))
        num_blocks = budget_bytes // (layers * full.page_size_bytes)
        config = KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=0)
        self._manager = KVCacheManager(config, 1 << 20, block, block, max_in_flight_tokens=chunk)
        self._block, self._chunk = block, chunk
        self._running: dict[int, Any] = {}
        self._preempted: dict[int, Hit] = {}
        """What requests that had to stop half-way had found at first: what they computed until then is no hit."""

    def start(self, request: Request, now_ns: int) -> Hit | None:
        manager = self._manager
        hashes = [number.to_bytes(8, "big") for number in request.blocks(self._block)]
        inner = self._request(
            str(request.index),
            [0] * request.prompt_tokens,
            self._params,
            None,
            block_hasher=lambda r: hashes[len(r.block_hashes) : r.num_tokens // self._block],
        )
        blocks, hit, inner.shared_prefix_boundary = manager.get_computed_blocks(inner)
        _, by_group = manager.coordinator.find_longest_cache_hit_per_group(
            inner.block_hashes, request.prompt_tokens - 1
        )
        inner.append_output_token_ids([0] * request.output_tokens)  # now, so that room is asked for the output too
        first = Hit(hit, max(hit, by_group[0]))
        found: dict[str, Any] = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
        done = hit
        while done < request.num_tokens:
            bound = request.prompt_tokens if done < request.prompt_tokens else request.num_tokens
            count = min(self._chunk, bound - done)
            if manager.allocate_slots(inner, count, full_sequence_must_fit=bool(found), **found) is None:
                if not found:
                    manager.free(inner)
                    self._preempted.setdefault(request.index, first)
                return None
            done += count
            inner.num_computed_tokens, found = done, {}
        self._running[request.index] = inner
        return self._preempted.pop(request.index, first)

    def end(self, request: Request, now_ns: int) -> None:
        self._manager.free(self._running.pop(request.index))


class Worker:
    """Answers `replay`."""

    def replay(self, trace: str, limit: int, **cache: Any) -> dict[str, Any]:
        return replay(load(trace, limit), VllmCache(**cache)).facts()

    def facts(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}


if __name__ == "__main__":
    serve(Worker)
