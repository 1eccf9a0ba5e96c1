"""SGLang's UnifiedRadixCache (full + SWA) for `prefix_cache.py`, in SGLang's environment. No model, no scheduler.

Its tree and allocator are driven as its scheduler drives them: match, lock, allocate a chunk, publish it, let go of SWA
slots out of the window, and release when the request ends. One of its tokens stands for a block here, with a window of
one: all systems work in such blocks, so nothing but time is saved by it. The pools have Cygnet's sizes.
"""

import sys
from array import array
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from worker import serve

sys.path.insert(0, str(Path(__file__).parent.parent))
from prefix_replay import Hit, replay
from prefix_traces import Request, load

MAX_RUNNING = 256


def without_torchvision() -> None:
    """Stand-ins for torchvision, which SGLang imports and its cache never uses: PyPI's is linked against CUDA."""
    import transformers  # noqa: F401  looks for torchvision itself, and must not find these

    for name in (
        "",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
        ".io",
        ".ops",
    ):
        module = MagicMock(name=f"torchvision{name}")
        module.__spec__ = ModuleSpec(f"torchvision{name}", None, is_package=True)
        module.__path__, module.__name__, module.__version__ = [], f"torchvision{name}", "0.0"
        sys.modules[f"torchvision{name}"] = module


class SglangCache:
    def __init__(self, full_blocks: int, swa_blocks: int, block: int, chunk: int) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache, common
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self._torch, self._common, self._match = torch, common, base_prefix_cache.MatchPrefixParams
        self._key = RadixKey
        sizes: dict[str, Any] = {
            "size": full_blocks, "size_swa": swa_blocks, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"
        }  # fmt: skip
        kv = SWAKVPool(**sizes, head_num=1, head_dim=1, swa_attention_layer_ids=[0], full_attention_layer_ids=[1])
        self._allocator = SWATokenToKVPoolAllocator(**sizes, kvcache=kv, need_sort=False)
        self._rows = ReqToTokenPool(
            size=MAX_RUNNING, max_context_len=(1 << 20) // block, device="cpu", enable_memory_saver=False
        )
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self._allocator,
                page_size=1,
                sliding_window_size=1,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        self._block, self._chunk = block, chunk // block
        self._running: dict[int, Any] = {}
        self._preempted: dict[int, Hit] = {}
        """What requests that had to stop half-way had found at first: what they computed until then is no hit."""

    def _room(self, full: int) -> bool:
        allocator, cache = self._allocator, self._cache
        return (
            full <= allocator.full_available_size() + cache.full_evictable_size()
            and self._chunk + 2 <= allocator.swa_available_size() + cache.swa_evictable_size()
        )

    def start(self, request: Request, now_ns: int) -> Hit | None:
        cache, block = self._cache, self._block
        ids = array("q", request.blocks(block))
        total = -(-request.num_tokens // block)
        prompt = request.prompt_tokens // block
        if len(self._running) == MAX_RUNNING or not self._room(0):
            return None
        match = cache.match_prefix(self._match(key=self._key(ids, limit=(request.prompt_tokens - 1) // block)))
        hit = match.device_prefix_len
        lock = cache.lock(match.last_device_node)
        if not self._room(total - hit):
            cache.unlock(lock)
            return None
        req = self._new(request, ids, prompt, match, lock)
        row = req.kv.req_pool_idx
        self._rows.write((row, slice(0, hit)), cache.path_device_indices(req.last_node)[:hit].to(self._torch.int32))
        first = Hit(hit * block, max(hit, match.full_kv_hit_length) * block)
        done = hit
        while done < total:
            end = min(prompt if done < prompt else total, done + self._chunk)
            if not self._allocate(req, done, end):
                self._release(req, done)
                self._preempted.setdefault(request.index, first)
                return None
            if end <= prompt:
                req.extend_end = end
                self._common.checkpoint_kv_cache(req, cache)
            else:
                cache.evict_sliding_windows(req, end - 1)
            done = end
        self._running[request.index] = req
        return self._preempted.pop(request.index, first)

    def _new(self, request: Request, ids: "array[int]", prompt: int, match: Any, lock: Any) -> Any:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        req = SimpleNamespace(
            rid=str(request.index),
            kv=ReqKvInfo(cache_protected_len=match.device_prefix_len),
            full_untruncated_fill_ids=ids,
            origin_input_ids=ids[:prompt],
            extra_key=None,
            cache_salt=None,
            priority=None,
            session=None,
            session_id=None,
            kv_rotation_base=None,
            skip_radix_cache_insert=False,
            swa_branching_seqlen=match.swa_branching_seqlen,
            last_node=match.last_device_node,
            lock=lock,
            prefix_len=match.device_prefix_len,
            is_done=False,
        )
        req.finished = lambda: req.is_done
        req.get_fill_ids = lambda: ids[: req.extend_end]
        req.kv.req_pool_idx = self._rows.free_slots.pop()
        return req

    def _allocate(self, req: Any, first: int, end: int) -> bool:
        self._common.evict_from_tree_cache(self._cache, end - first)
        slots = self._allocator.alloc(end - first)
        if slots is None:
            return False
        self._rows.write((req.kv.req_pool_idx, slice(first, end)), slots.to(self._torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        return True

    def end(self, request: Request, now_ns: int) -> None:
        req = self._running.pop(request.index)
        self._release(req, len(req.full_untruncated_fill_ids))

    def _release(self, req: Any, upto: int) -> None:
        """What `release_kv_cache` does, whose check of the slots behind the last whole block asks for a server."""
        cache = self._cache
        req.is_done = True
        cache.checkpoint(req, up_to=upto)
        cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_allocated_len)])
        cache.unlock(req.lock)
        cache.on_release(req, checkpointed=True)
        self._rows.free_slots.append(req.kv.req_pool_idx)


class Worker:
    """Answers `replay`."""

    def __init__(self) -> None:
        without_torchvision()

    def replay(self, trace: str, limit: int, **cache: Any) -> dict[str, Any]:
        return replay(load(trace, limit), SglangCache(**cache)).facts()

    def facts(self) -> dict[str, Any]:
        import sglang

        return {"version": sglang.__version__}


if __name__ == "__main__":
    serve(Worker)
