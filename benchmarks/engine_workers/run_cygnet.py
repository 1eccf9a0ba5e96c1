"""Cygnet's engine, in process, for `engine.py`: --threads N --kv BYTES [--weight-dtype int8]."""

import argparse
from time import perf_counter
from typing import Any

from worker import Prompt, resident_bytes, serve

from cygnet.base.config import Config, EngineSettings, KVSettings, ModelSettings
from cygnet.base.ids import RequestId
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import load_engine


class Cygnet:
    def __init__(self, options: argparse.Namespace) -> None:
        config = Config(
            model=ModelSettings(model="gemma3-270m", weight_dtype=options.weight_dtype, dtype="bfloat16"),
            engine=EngineSettings(num_threads=options.threads, audit="off"),
            kv=KVSettings(memory=options.kv),
        )
        self._engine, self._ready = load_engine(config)
        self._count = 0

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
        started = perf_counter()
        self._send(prompts, steps)
        drain(self._engine)
        return perf_counter() - started

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
            "summary": model.summary,
        }


def drain(engine: LocalEngine) -> None:
    while engine.busy:
        engine.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv", required=True)
    parser.add_argument("--weight-dtype", default="auto")
    options = parser.parse_args()
    serve(lambda: Cygnet(options))
