"""All layers of a decode step as one list of kernel calls, recorded once and then run without Python in between.

A step of one token is some 160 short kernels; calling them one by one from Python took a quarter of its time. What a
first step of a batch size launches is recorded, with the memory it uses; later steps of that size copy their input
there, write their attention plan into the recorded arguments, and run the list.

A model that does anything else between its kernels (a plain torch operator) is not recorded and runs as before. While a
step is recorded, no other model may run in the process.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cygnet.model.cpu.kernels import Kernel, recording
from cygnet.model.cpu.team import num_threads, openmp_start
from cygnet.model.rope import Cos, Sin

MOST_BYTES = 64 << 20
"""Memory of all recorded steps together. Where Python's share matters, models and batches are small."""

_NO_WORK = frozenset((
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "view", "_unsafe_view", "slice", "select",
    "alias", "detach", "t", "transpose", "as_strided", "_reshape_alias", "split", "split_with_sizes", "unbind",
    "permute", "squeeze", "unsqueeze",
))  # fmt: skip
"""Operators that make or look at memory, and compute nothing."""
_VIEWS = frozenset(("reshape", "contiguous", "flatten", "to", "float"))
"""The same, when they give back the memory that they got."""

Ropes = Mapping[Any, tuple[Cos, Sin]]
Body = Callable[[Tensor, Ropes], Tensor]


@runtime_checkable
class Replayable(Protocol):
    """A plan whose step may be recorded, and replayed with another plan of the same kind."""

    @property
    def arguments(self) -> tuple[int, dict[int, int]] | None:
        """Threads, and p[...] of its kernel, by which its calls are known and which change from step to step: the
        first of them identifies the plan. `None`: not to be recorded."""


class _Watch(TorchDispatchMode):
    """Keeps what is made, and notes what computes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        out = function(*args, **(kwargs or {}))
        if name not in _NO_WORK and not (name in _VIEWS and out.data_ptr() == args[0].data_ptr()):
            self.others.add(name)
        made = out if isinstance(out, tuple | list) else (out,)
        self.kept += [tensor for tensor in made if isinstance(tensor, Tensor)]
        return out

    @property
    def num_bytes(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self.kept}
        return sum(storages.values())


class _Program:
    """One recorded step."""

    def __init__(self, body: Body, x: Tensor, ropes: Ropes, plans: list[Replayable], caches: list[Any]) -> None:
        """Runs the step, too: its result is `out`."""
        self._caches = caches
        self._x = x.clone()
        self._ropes = {spec: (cos.clone(), sin.clone()) for spec, (cos, sin) in ropes.items()}
        self._watch = _Watch()
        with recording() as calls, self._watch:
            self.out = body(self._x, self._ropes)
        self.works = not self._watch.others
        self.num_bytes = self._watch.num_bytes
        width = max(len(block) for _, block, _ in calls)
        self._blocks = np.zeros((len(calls), width), dtype=np.int64)
        for row, (_, block, _) in zip(self._blocks, calls, strict=True):
            row[: len(block)] = block
        self._kernels = np.array([address for address, _, _ in calls], dtype=np.int64)
        self._threads = np.array([threads for _, _, threads in calls], dtype=np.int64)
        self._places = [self._calls_of(plan) for plan in plans]
        self._run = Kernel("program", torch.float32)

    def _calls_of(self, plan: Replayable) -> np.ndarray:
        """Which calls were made for a plan."""
        assert plan.arguments is not None
        column, value = next(iter(plan.arguments[1].items()))
        return np.flatnonzero(self._blocks[:, column] == value)

    def replay(self, x: Tensor, ropes: Ropes, plans: list[Replayable]) -> Tensor:
        self._x.copy_(x)
        for spec, (cos, sin) in ropes.items():
            self._ropes[spec][0].copy_(cos)
            self._ropes[spec][1].copy_(sin)
        for places, plan in zip(self._places, plans, strict=True):
            assert plan.arguments is not None
            threads, values = plan.arguments
            self._threads[places] = threads
            for column, value in values.items():
                self._blocks[places, column] = value
        self._run(
            1,
            len(self._blocks),
            self._kernels.ctypes.data,
            self._blocks.ctypes.data,
            self._blocks.strides[0],
            self._threads.ctypes.data,
            openmp_start(),
        )
        return self.out.clone()


class StepPrograms:
    """Recorded steps of one model, by batch size."""

    def __init__(self) -> None:
        self._programs: dict[tuple[int, ...], _Program | None] = {}
        self._room = MOST_BYTES

    def run(self, body: Body, x: Tensor, ropes: Ropes, plans: list[Any], caches: list[Any]) -> Tensor:
        """`body(x, ropes)`, by replaying it where possible.

        `plans` are the attention plans that `body` uses, `caches` the lists of layers whose KV it reads and writes.
        """
        usable = [plan for plan in plans if isinstance(plan, Replayable) and plan.arguments is not None]
        if len(usable) < len(plans):
            return body(x, ropes)
        key = (x.shape[0], num_threads(), *map(id, caches))
        if key in self._programs:
            program = self._programs[key]
            return body(x, ropes) if program is None else program.replay(x, ropes, usable)
        return self._record(key, body, x, ropes, usable, caches)

    def _record(
        self, key: tuple[int, ...], body: Body, x: Tensor, ropes: Ropes, plans: list[Replayable], caches: list[Any]
    ) -> Tensor:
        self._programs[key] = None
        if any(program is None for other, program in self._programs.items() if other != key and other[0] <= key[0]):
            return body(x, ropes)
        program = _Program(body, x, ropes, plans, caches)
        if program.works and program.num_bytes <= self._room:
            self._room -= program.num_bytes
            self._programs[key] = program
        return program.out.clone()
