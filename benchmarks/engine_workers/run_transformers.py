"""Hugging Face transformers for `engine.py`: --threads N --model FOLDER [--dtype NAME].

Prompts go in by chunks of 1,024 tokens, which is faster here than all at once. There is no prefix cache between calls;
`warm` keeps the KV of the prompts it is given, so that `decode` and `first_token` start from there, as an application
that holds on to `past_key_values` would.
"""

import argparse
import copy
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from worker import Prompt, resident_bytes, serve

CHUNK = 1024


class Transformers:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        self._model.eval()
        self._kept: tuple[list[Prompt], DynamicCache] | None = None

    def prefill(self, prompt: Prompt) -> float:
        started = perf_counter()
        self._run([prompt], self._new_cache())
        return perf_counter() - started

    @torch.inference_mode()
    def decode(self, prompts: list[Prompt], steps: int) -> float:
        cache, token = self._cache_of(prompts), torch.tensor([[prompt[-1]] for prompt in prompts])
        token = self._step(token, cache)
        started = perf_counter()
        for _ in range(steps):
            token = self._step(token, cache)
        return (perf_counter() - started) / steps

    def first_token(self, prompts: list[Prompt], steps: int) -> float:
        raise NotImplementedError("no prefix cache")

    def warm(self, prompts: list[Prompt]) -> None:
        cache = self._new_cache()
        self._run(prompts, cache)
        self._kept = (prompts, cache)

    def facts(self) -> dict[str, Any]:
        return {"version": transformers.__version__, "resident_bytes": resident_bytes()}

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _cache_of(self, prompts: list[Prompt]) -> DynamicCache:
        if self._kept is None or self._kept[0] != prompts:
            self.warm(prompts)
        assert self._kept is not None
        return copy.deepcopy(self._kept[1])

    @torch.inference_mode()
    def _run(self, prompts: list[Prompt], cache: DynamicCache) -> torch.Tensor:
        ids = torch.tensor(prompts)
        for start in range(0, ids.shape[1], CHUNK):
            token = self._step(ids[:, start : start + CHUNK], cache)
        return token

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    serve(lambda: Transformers(options))
