"""What number formats cost: perplexity, agreement of the likeliest token, greedy text; against fp32.

    python benchmarks/quality.py [--quick] [--json FILE] [--threads N] [--variants NAME ...]

The text is the source of the standard library's argparse, the model Gemma 3 270M. `chunks` feeds the text 512 tokens at
a time, `single` token by token (products of one row may be computed otherwise than those of many); both from the text's
beginning. `same top` is how often the likeliest next token is fp32's, given the same text before it. `greedy` counts
the tokens, of those generated after the text's first 256, up to the first that differs from fp32's.
"""

import argparse
import inspect
import json
import math
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cygnet.base.ids import BlockId
from cygnet.base.threads import usable_cpus
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes
from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from cygnet.model.source import find_model

BLOCK, CHUNK, PROMPT = 16, 512, 256
VARIANTS: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "float32": (torch.float32, {}),
    "float32, matrices in bfloat16": (torch.float32, {"weight_dtype": torch.bfloat16, "pack_tied_head": True}),
    "float32, matrices and KV in bf16": (torch.float32, {"weight_dtype": torch.bfloat16, "pack_tied_head": True}),
    "float32, int8": (torch.float32, {"int8": True, "pack_tied_head": True}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, torch kernels": (torch.bfloat16, {"attention_backend": "torch", "step_kernels": "torch"}),
    "int8": (torch.bfloat16, {"int8": True, "pack_tied_head": True}),
    "int8, bytes only": (torch.bfloat16, {"int8": True}),
}


NARROW_KV = "float32, matrices and KV in bf16"


@dataclass(frozen=True)
class Subject:
    """A model and what its KV is kept in."""

    model: HybridModel
    kv_dtype: torch.dtype


class Sequence:
    """One sequence in pools of its own, all blocks kept."""

    def __init__(self, subject: Subject, capacity: int) -> None:
        self._model = subject.model
        geometry = subject.model.description.kv_geometry(subject.kv_dtype.itemsize)
        blocks = -(-capacity // BLOCK)
        sizes = PoolSizes(BLOCK, blocks, blocks, capacity)
        self._pool = DevicePool(geometry, sizes, dtype=subject.kv_dtype, device="cpu")
        self._table = torch.tensor([[BlockId(b) for b in range(blocks)]])
        self._done = 0

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each of the next tokens."""
        start, end = self._done, self._done + len(tokens)
        positions = torch.arange(start, end)

        def group(layers: list) -> GroupBatch:  # type: ignore[type-arg]
            return GroupBatch(self._table, [0], [0], positions, layers)

        self._done = end
        hidden = self._model(
            ForwardBatch(
                token_ids=torch.tensor(tokens),
                positions=positions,
                query_start=[0, len(tokens)],
                seq_lens=[end],
                block_size=BLOCK,
                full=group(self._pool.full),
                swa=group(self._pool.swa) if self._pool.swa else None,
            )
        )
        return self._model.logits(hidden)


@dataclass
class Scores:
    """Of one variant; `tops` are the likeliest tokens and not reported."""

    chunks_perplexity: float
    single_perplexity: float
    chunks_same_top: float
    single_same_top: float
    greedy_equal: int


def follow(model: Subject, tokens: list[int], step: int) -> tuple[float, list[int]]:
    """Perplexity of `tokens` fed `step` at a time, and the likeliest token after each."""
    sequence, loss, tops = Sequence(model, len(tokens)), 0.0, []
    for start in range(0, len(tokens), step):
        logits = sequence.feed(tokens[start : start + step])
        tops += logits.argmax(-1).tolist()
        following = torch.tensor(tokens[start + 1 : start + step + 1], dtype=torch.int64)
        loss += float(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return math.exp(loss / (len(tokens) - 1)), tops


def generate(model: Subject, prompt: list[int], count: int) -> list[int]:
    sequence = Sequence(model, len(prompt) + count)
    out = [int(sequence.feed(prompt)[-1].argmax())]
    while len(out) < count:
        out.append(int(sequence.feed(out[-1:])[-1].argmax()))
    return out


def agreement(ours: list[int], theirs: list[int]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def main() -> int:
    parser = argparse.ArgumentParser(description="What number formats cost in quality.")
    parser.add_argument("--quick", action="store_true", help="512 tokens of text, 50 generated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = find_model("gemma3-270m")
    length, single, count = (512, 128, 50) if options.quick else (4096, 512, 200)
    tokens = list(source.tokenizer().encode(inspect.getsource(argparse)))[:length]
    results: dict[str, Scores] = {}
    reference: tuple[list[int], list[int], list[int]] | None = None
    print(f"{'':<31}{'perplexity: chunks':>19}{'single':>9}{'same top: chunks':>18}{'single':>9}{'greedy':>12}")
    for name in dict.fromkeys(["float32", *options.variants]):
        dtype, settings = VARIANTS[name]
        built = build_model(source.checkpoint(dtype=dtype), dtype=dtype, **settings)  # type: ignore[arg-type]
        model = Subject(built, torch.bfloat16 if name == NARROW_KV else dtype)
        chunks, chunk_tops = follow(model, tokens, CHUNK)
        alone, single_tops = follow(model, tokens[:single], 1)
        text = generate(model, tokens[:PROMPT], count)
        if reference is None:
            reference = chunk_tops, single_tops, text
        equal = next((i for i in range(count) if text[i] != reference[2][i]), count)
        row = Scores(chunks, alone, agreement(chunk_tops, reference[0]), agreement(single_tops, reference[1]), equal)
        results[name] = row
        print(
            f"{name:<31}{row.chunks_perplexity:>19.4f}{row.single_perplexity:>9.4f}{row.chunks_same_top:>18.2%}"
            f"{row.single_same_top:>9.2%}{f'{equal} of {count}':>12}",
            flush=True,
        )
        del model
    if options.json:
        config = {"tokens": length, "single": single, "generated": count, "threads": options.threads}
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        scores = {name: asdict(row) for name, row in results.items()}
        options.json.write_text(json.dumps({"config": config, "environment": machine, "results": scores}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
