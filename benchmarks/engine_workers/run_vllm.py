"""vLLM on a CPU for `engine.py`, in its own environment: --threads N --model FOLDER [--dtype NAME] --kv GIB."""

import argparse
import os
from time import perf_counter
from typing import Any

from worker import Prompt, resident_bytes, serve


class Vllm:
    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams, TokensPrompt  # reads the environment when imported

        self._params, self._prompt = SamplingParams, TokensPrompt
        self._llm = LLM(
            options.model,
            dtype=options.dtype,
            enable_prefix_caching=True,
            max_num_batched_tokens=2048,
            max_num_seqs=32,
            max_model_len=32768,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            enforce_eager=options.eager,
        )
        self._engine = self._llm.llm_engine
        self._count = 0

    def _send(self, prompts: list[Prompt], steps: int) -> list[str]:
        ids = []
        for prompt in prompts:
            self._count += 1
            ids.append(f"r{self._count}")
            params = self._params(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
            self._engine.add_request(ids[-1], self._prompt(prompt_token_ids=prompt), params)
        return ids

    def prefill(self, prompt: Prompt) -> float:
        return self.first_token([prompt], 1)

    def decode(self, prompts: list[Prompt], steps: int) -> float:
        waiting = set(self._send(prompts, steps + 2 * len(prompts) + 64))
        ids = list(waiting)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        started = perf_counter()
        for _ in range(steps):
            assert len(self._engine.step()) == len(prompts)
        seconds = perf_counter() - started
        self._engine.abort_request(ids)
        return seconds / steps

    def first_token(self, prompts: list[Prompt], steps: int) -> float:
        started = perf_counter()
        self._send(prompts, steps)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return perf_counter() - started

    def warm(self, prompts: list[Prompt]) -> None:
        self.first_token(prompts, 1)

    def facts(self) -> dict[str, Any]:
        import vllm

        scheduler = self._engine.engine_core.engine_core.scheduler
        config = scheduler.kv_cache_config
        return {
            "version": vllm.__version__,
            "resident_bytes": resident_bytes(),
            "kv_pool_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
            "kv_blocks": config.num_blocks,
            "kv_groups": [
                {
                    "layers": len(group.layer_names),
                    "spec": type(group.kv_cache_spec).__name__,
                    "block_size": group.kv_cache_spec.block_size,
                    "block_bytes": group.kv_cache_spec.page_size_bytes,
                }
                for group in config.kv_cache_groups
            ],
        }

    def held(self, prompt: Prompt) -> dict[str, Any]:
        """Bytes of KV that a running sequence of this prompt holds, from the engine's own block tables."""
        (request_id,) = self._send([prompt], 64)
        manager = self._engine.engine_core.engine_core.scheduler.kv_cache_manager
        while not any(output.outputs[0].token_ids for output in self._engine.step()):
            pass
        requests = self._engine.engine_core.engine_core.scheduler.requests
        inner = next(iter(requests))
        groups = manager.get_blocks(inner).blocks
        config = self._engine.engine_core.engine_core.scheduler.kv_cache_config
        sizes = [len(g.layer_names) * g.kv_cache_spec.page_size_bytes for g in config.kv_cache_groups]
        live = [sum(1 for block in blocks if not block.is_null) for blocks in groups]
        self._engine.abort_request([request_id])
        return {"bytes": sum(count * size for count, size in zip(live, sizes, strict=True)), "blocks": live}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", default="4")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=options.kv,
        VLLM_CPU_OMP_THREADS_BIND=f"0-{options.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    serve(lambda: Vllm(options))
