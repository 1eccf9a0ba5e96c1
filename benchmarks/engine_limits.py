"""What this machine could do at most: its bandwidth and GEMM rate, and the time that a model's work takes at those."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from cygnet.model.description import ModelDescription


@dataclass(frozen=True)
class Work:
    """What a piece of work must at least read and multiply."""

    flops: float
    read_bytes: float


@dataclass(frozen=True)
class ModelWork:
    """The work of a model whose weights and KV have so many bytes per element."""

    description: ModelDescription
    weight_bytes: float = 2.0
    kv_bytes: int = 2

    def decode(self, batch: int, context: int) -> Work:
        """One step: all weights once, the KV of every sequence."""
        description, geometry = self.description, self.description.kv_geometry(self.kv_bytes)
        weights = description.num_parameters
        seen = min(context, geometry.window + 1) if geometry.has_swa else 0
        layers = ((geometry.full, context), (geometry.swa, seen))
        kv = sum(g.num_layers * g.num_kv_heads * (g.key_dim + g.value_dim) * self.kv_bytes * keys for g, keys in layers)
        pairs = sum(g.num_layers * keys for g, keys in layers)
        return Work(batch * (2 * weights + self._per_pair * pairs), weights * self.weight_bytes + batch * kv)

    def prefill(self, tokens: int, prefix: int = 0) -> Work:
        """`tokens` behind a cached prefix; the LM head for one of them, which is next to nothing."""
        description, geometry = self.description, self.description.kv_geometry(self.kv_bytes)
        head = description.vocab_size * description.hidden_size
        seen = geometry.window + 1
        mean_full = prefix + tokens / 2
        mean_swa = min(seen, tokens / 2 if prefix == 0 else seen)
        pairs = tokens * (geometry.full.num_layers * mean_full + geometry.swa.num_layers * mean_swa)
        weights = description.num_parameters - head
        return Work(2 * weights * tokens + self._per_pair * pairs, description.num_parameters * self.weight_bytes)

    @property
    def _per_pair(self) -> int:
        """Multiplications and additions of a query token and a key, in one layer."""
        spec = next(self.description.group_layers("full"))
        return 2 * spec.num_heads * (spec.key_dim + spec.value_dim)


@dataclass(frozen=True)
class Limits:
    """What the machine does, measured now."""

    read_bytes_per_s: float
    flops_per_s: float

    @staticmethod
    def measure(clock: Callable[[], float] = perf_counter, dtype: torch.dtype = torch.bfloat16) -> "Limits":
        """Reading 400 MB and a product in `dtype`, on as many threads as torch has."""
        big = torch.ones(96 << 20)
        a, b = torch.randn(1024, 2048).to(dtype), torch.randn(4096, 2048).to(dtype)
        read = big.nbytes / best(lambda: big.sum(), clock)
        flops = 2 * a.shape[0] * b.numel() / best(lambda: torch.nn.functional.linear(a, b), clock)
        return Limits(read, flops)

    def seconds(self, work: Work) -> float:
        """The least time: reading and multiplying go on together."""
        return max(work.read_bytes / self.read_bytes_per_s, work.flops / self.flops_per_s)


def best(work: Callable[[], object], clock: Callable[[], float], count: int = 5) -> float:
    times = []
    for _ in range(count + 1):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times[1:])
