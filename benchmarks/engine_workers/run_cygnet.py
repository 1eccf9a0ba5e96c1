"""Cygnet's engine, in process: --threads N --kv BYTES [--weight-dtype int8] [--host-cache BYTES] [--store FOLDER:SIZE].

For `engine.py`, and with more operations for `tiers.py` and `branches.py`:

    {"op": "hit"}                              tokens of the last call's first prompt by tier, and replayed
    {"op": "forget", "tier": "device"}         drop what the device holds; "host": and what the host holds
    {"op": "forget_windows"}                   drop every retained window of device and host; full KV stays
    {"op": "imitate", "bytes_per_s": n | null, "layer_wise": bool}
                                               copy as a slower link would, or all before computing
    {"op": "written"}                          wait until the store has all that is to be written
    {"op": "traffic"}                          what has been read from the store since the last time
    {"op": "close"}                            end in order, as a server does; the last operation
"""

import argparse
import time
from time import perf_counter
from typing import Any

from worker import Prompt, resident_bytes, serve

from cygnet.base.config import Config, EngineSettings, KVSettings, ModelSettings
from cygnet.base.ids import RequestId
from cygnet.base.messages import AddRequest, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import load_engine

WRITTEN_S = 120


class Cygnet:
    def __init__(self, options: argparse.Namespace) -> None:
        config = Config(
            model=ModelSettings(model="gemma3-270m", weight_dtype=options.weight_dtype),
            engine=EngineSettings(num_threads=options.threads, audit="off"),
            # However slow the machine is: what is in the store is what was asked for.
            kv=KVSettings(memory=options.kv, host_cache=options.host_cache, store=options.store, store_wait="wait"),
        )
        self._engine, self._ready = load_engine(config)
        self._count = 0
        self._hit: RequestOutput | None = None
        self._rebuilt = self._bytes_read = 0
        self._fetch_seconds = 0.0

    def _send(self, prompts: list[Prompt], steps: int) -> list[str]:
        ids = []
        for prompt in prompts:
            self._count += 1
            ids.append(f"r{self._count}")
            sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
            self._engine.add(AddRequest(ids[-1], prompt, sampling))
        return ids

    def prefill(self, prompt: Prompt) -> float:
        return self.first_token([prompt], 1)

    def decode(self, prompts: list[Prompt], steps: int) -> float:
        """Steps are timed once all prompts have a first token, until the first request ends."""
        waiting = set(self._send(prompts, steps + 2 * len(prompts) + 64))
        ids = list(waiting)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        started = perf_counter()
        for _ in range(steps):
            assert len(self._engine.step()) == len(prompts)
        seconds = perf_counter() - started
        self._engine.abort(ids)
        return seconds / steps

    def first_token(self, prompts: list[Prompt], steps: int) -> float:
        self._rebuilt = self._engine.stats().rebuilt_tokens_total
        started = perf_counter()
        first, *_ = waiting = self._send(prompts, steps)
        open_ids = set(waiting)
        while open_ids:
            for output in self._engine.step():
                if output.request_id == first:
                    self._hit = output
                if output.finish_reason is not None:
                    open_ids.discard(output.request_id)
        seconds = perf_counter() - started
        drain(self._engine)  # copies to slower tiers that no answer waits for
        return seconds

    def hit(self) -> dict[str, Any]:
        assert self._hit is not None
        cached, host, store = self._hit.num_cached_tokens, self._hit.num_host_tokens, self._hit.num_store_tokens
        rebuilt = self._engine.stats().rebuilt_tokens_total - self._rebuilt
        return {"device": cached - host - store, "host": host, "store": store, "rebuilt": rebuilt}

    def forget(self, tier: str) -> dict[str, Any]:
        if tier == "host":
            self._engine.flush_cache()
        else:
            self._engine.core.kv.tree.flush()
        return {}

    def forget_windows(self) -> dict[str, Any]:
        kv = self._engine.core.kv
        for tree in [kv.tree] + ([kv.host.tree] if kv.host is not None else []):
            for node in tree.nodes():
                tree.drop_checkpoint(node)
        return {}

    def imitate(self, bytes_per_s: float | None, layer_wise: bool) -> dict[str, Any]:
        assert self._engine.tiers is not None
        self._engine.tiers.transfers.imitate(bytes_per_s=bytes_per_s, layer_wise=layer_wise)
        return {}

    def written(self) -> dict[str, Any]:
        store = self._engine.core.kv.store
        deadline = time.monotonic() + WRITTEN_S
        while store is not None and not store.writes.idle:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the store did not take in {WRITTEN_S} s what was put")
            self._engine.waker.wait(0.1)
            self._engine.hear_store()
        return {}

    def traffic(self) -> dict[str, Any]:
        assert self._engine.tiers is not None
        assert self._engine.tiers.worker is not None
        traffic = self._engine.tiers.worker.traffic()
        since = {
            "bytes_read": traffic.bytes_read - self._bytes_read,
            "fetch_seconds": traffic.fetch_seconds - self._fetch_seconds,
        }
        self._bytes_read, self._fetch_seconds = traffic.bytes_read, traffic.fetch_seconds
        return since

    def warm(self, prompts: list[Prompt]) -> None:
        self._send(prompts, 1)
        drain(self._engine)

    def held(self, prompt: Prompt) -> dict[str, Any]:
        """Bytes of KV that a running sequence of this prompt holds."""
        (request_id,) = self._send([prompt], 64)
        while not self._engine.step():
            pass
        kv = self._engine.core.kv
        request = self._engine.core.running[RequestId(request_id)].kv
        full, swa = len(request.full_blocks), len(request.swa_blocks) - request.live_from
        size = kv.block_size
        held = full * kv.geometry.full.block_bytes(size) + swa * kv.geometry.swa.block_bytes(size)
        self._engine.abort([request_id])
        return {"bytes": held, "blocks": [full, swa]}

    def facts(self) -> dict[str, Any]:
        kv, model = self._engine.core.kv, self._ready
        return {
            "version": "this commit",
            "kv_pool_bytes": kv.sizes.num_bytes(kv.geometry),
            "resident_bytes": resident_bytes(),
            "block_size": kv.block_size,
            "full_block_bytes": kv.geometry.full.block_bytes(kv.block_size),
            "window_bytes": kv.tree.window_blocks * kv.geometry.swa.block_bytes(kv.block_size),
            "summary": model.summary,
        }

    def close(self) -> dict[str, Any]:
        self._engine.close()
        return {}


def drain(engine: LocalEngine) -> None:
    while engine.busy:
        engine.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv", required=True)
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--host-cache", default="off")
    parser.add_argument("--store", default="")
    options = parser.parse_args()
    serve(lambda: Cygnet(options))
