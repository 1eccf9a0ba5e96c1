"""Drives a `HybridModel` with page tables of its own: trivially simple, shuffled, and poisoned.

Every slot that no position owns holds NaN, and out-of-window SWA blocks are given back (and poisoned) after each step,
so that a read of anything but the live keys shows in the logits.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV, Wanted
from cygnet.model.decoder import HybridModel
from cygnet.model.description import GroupName

NAN = float("nan")


class FolderCheckpoint:
    """A Hugging Face folder with one safetensors file, as transformers saves tiny models."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self._file = folder / "model.safetensors"
        self.num_bytes = self._file.stat().st_size

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        with safe_open(self._file, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                yield name, tensor, tensor.nbytes


@dataclass
class Pool:
    """KV tensors of one group and the free blocks, handed out in random order."""

    layers: list[LayerKV]
    free: list[int]

    @classmethod
    def create(cls, model: HybridModel, group: GroupName, num_blocks: int, block_size: int, seed: int) -> "Pool":
        layers = [
            LayerKV(
                torch.full((num_blocks, block_size, spec.num_kv_heads, spec.key_dim), NAN, dtype=model.dtype),
                torch.full((num_blocks, block_size, spec.num_kv_heads, spec.value_dim), NAN, dtype=model.dtype),
            )
            for spec in model.description.group_layers(group)
        ]
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        return cls(layers, free)

    def release(self, block: int) -> None:
        """Free a block and poison it."""
        for layer in self.layers:
            layer.key[block] = NAN
            layer.value[block] = NAN
        self.free.insert(0, block)


@dataclass
class Request:
    """One request: its tokens, how many are computed, and its blocks by block index."""

    tokens: list[int]
    computed: int = 0
    full: dict[int, int] = field(default_factory=dict)
    swa: dict[int, int] = field(default_factory=dict)
    swa_floor: int = 0
    authoritative: int = 0
    """Positions below it have full KV that must not be written again."""
    exact_from: int = 0
    """Of a replay that leaves out what its end does not need: from where on SWA KV must be right."""


class Harness:
    """Pools for one model; `step` runs any mix of chunks, `prefill` and `greedy` are loops over it."""

    def __init__(self, model: HybridModel, *, block_size: int = 4, num_blocks: int = 512, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.window = model.description.window
        self.full = Pool.create(model, "full", num_blocks, block_size, seed)
        self.swa = Pool.create(model, "swa", num_blocks, block_size, seed + 1) if self.window else None

    def step(self, work: Sequence[tuple[Request, int]]) -> Tensor:
        """Run the next `count` tokens of each sequence; logits [all tokens, vocab]."""
        hidden = self.step_hidden(work)
        with torch.inference_mode():
            return self.model.logits(hidden).clone()

    def step_hidden(self, work: Sequence[tuple[Request, int]], wanted: Sequence[int] | None = None) -> Tensor:
        """As `step`, but the hidden states [all tokens, hidden_size], or [n, hidden_size] of the last tokens of those
        of `work` that are `wanted`."""
        for sequence, count in work:
            self._allocate(sequence, sequence.computed + count)
        batch = self._batch(work)
        if wanted is not None:
            rows = torch.tensor([batch.query_start[i + 1] - 1 for i in wanted], dtype=torch.int64)
            batch = replace(batch, wanted=Wanted(list(wanted), rows))
        with torch.inference_mode():
            hidden = self.model(batch)
        for sequence, count in work:
            sequence.computed += count
            self.drop_out_of_window(sequence)
        return hidden

    def hidden(self, sequence: Request, chunk: int) -> Tensor:
        """Compute the sequence in chunks; hidden states of all its tokens [n, hidden_size]."""
        parts = []
        while sequence.computed < len(sequence.tokens):
            parts.append(self.step_hidden([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))]))
        return torch.cat(parts)

    def prefill(self, sequence: Request, chunk: int) -> Tensor:
        """Compute the sequence in chunks; logits of all its tokens [n, vocab]."""
        hidden = self.hidden(sequence, chunk)
        with torch.inference_mode():
            return self.model.logits(hidden).clone()

    def greedy(self, prompt: list[int], count: int, *, chunk: int = 10**9) -> list[int]:
        """`count` greedy tokens after `prompt`."""
        sequence = Request(list(prompt))
        last = self.prefill(sequence, chunk)[-1]
        for _ in range(count - 1):
            sequence.tokens.append(int(last.argmax()))
            last = self.step([(sequence, 1)])[-1]
        sequence.tokens.append(int(last.argmax()))
        return sequence.tokens[len(prompt) :]

    def drop_out_of_window(self, sequence: Request) -> None:
        """Give back SWA blocks that no later query reads."""
        if self.swa is None:
            return
        for index in list(sequence.swa):
            if (index + 1) * self.block_size <= sequence.computed - self.window:
                self.swa.release(sequence.swa.pop(index))
        sequence.swa_floor = max(sequence.swa_floor, sequence.computed - self.window)

    def drop_swa(self, sequence: Request) -> None:
        """Lose the whole SWA window."""
        assert self.swa is not None
        for index in list(sequence.swa):
            self.swa.release(sequence.swa.pop(index))

    def rewind(self, sequence: Request, start: int, exact_from: int = 0) -> None:
        """Replay from `start`: full KV before the present end stays and is authoritative."""
        sequence.authoritative, sequence.computed, sequence.swa_floor = sequence.computed, start, start
        sequence.exact_from = exact_from

    def _allocate(self, sequence: Request, seq_len: int) -> None:
        for index in range(-(-seq_len // self.block_size)):
            if index not in sequence.full:
                sequence.full[index] = self.full.free.pop()
            in_window = (index + 1) * self.block_size > sequence.swa_floor
            if self.swa is not None and in_window and index not in sequence.swa:
                sequence.swa[index] = self.swa.free.pop()

    def _batch(self, work: Sequence[tuple[Request, int]]) -> ForwardBatch:
        positions = [list(range(s.computed, s.computed + n)) for s, n in work]
        query_start = [0]
        for row in positions:
            query_start.append(query_start[-1] + len(row))
        return ForwardBatch(
            token_ids=torch.tensor([s.tokens[p] for (s, _), row in zip(work, positions, strict=True) for p in row]),
            positions=torch.tensor([p for row in positions for p in row]),
            query_start=query_start,
            seq_lens=[s.computed + n for s, n in work],
            block_size=self.block_size,
            full=self._group(
                self.full.layers,
                [s.full for s, _ in work],
                positions,
                [0] * len(work),
                [s.authoritative for s, _ in work],
            ),
            swa=None
            if self.swa is None
            else self._group(
                self.swa.layers,
                [s.swa for s, _ in work],
                positions,
                [max(s.swa_floor, 0) for s, _ in work],
                [0] * len(work),
            ),
            exact_from=[s.exact_from for s, _ in work]
            if any(s.exact_from and s.computed < s.authoritative for s, _ in work)
            else None,
        )

    def _group(
        self,
        layers: list[LayerKV],
        tables: list[dict[int, int]],
        positions: list[list[int]],
        floors: list[int],
        authoritative: list[int],
    ) -> GroupBatch:
        first = [min(table) for table in tables]
        width = max(max(table) - low + 1 for table, low in zip(tables, first, strict=True))
        block_table = torch.zeros(len(tables), width, dtype=torch.int64)
        slots = []
        for request, table in enumerate(tables):
            for index, block in table.items():
                block_table[request, index - first[request]] = block
            for position in positions[request]:
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                slots.append(-1 if position < authoritative[request] else slot)
        return GroupBatch(block_table, first, floors, torch.tensor(slots), layers)
