"""Compiles every kernel for GPUs that need not be there: run by `test_compiles.py` in a process of its own.

Launches are recorded from the very wrappers the layers call, on meta-data only, and compiled with their real arguments'
types and constants. Prints one line per kernel and architecture: name, architecture, bytes of shared memory.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cygnet.model.attention import triton_paged
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.description import AttentionSpec, MoeSpec, RopeSpec
from cygnet.model.kernels import MoeParameters, elementwise, grouped_moe, paged_attention, tiles
from cygnet.model.kernels.fused import TritonKernels

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
Attributes = dict[tuple[int], list[tuple[str, int]]]
LAUNCH_OPTIONS = ("num_warps", "num_stages")


class Launches:
    """Stands in for a kernel's `kernel[grid](...)`: notes the arguments, runs nothing."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, dict[str, str], dict[str, Any], Attributes, dict[str, int]]] = {}

    def record(self, kernel: Any) -> Any:
        recorder = self

        class Recorder:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return lambda *args, **kwargs: recorder.note(kernel, args, kwargs)

        return Recorder()

    def note(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
        bound = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        constants = {kernel.arg_names[p.num] for p in kernel.params if p.is_constexpr}
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        attributes: Attributes = {}
        for index, name in enumerate(kernel.arg_names):
            value = bound[name]
            if name in constants or value is None:
                signature[name], constexprs[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            # What a launch finds out too, and without which loads are neither wide nor asynchronous.
            is_pointer = signature[name].startswith("*")
            if is_pointer or (signature[name] == "i32" and value % 16 == 0):
                attributes[(index,)] = [("tt.divisibility", 16)]
        key = f"{kernel.fn.__name__} {sorted(signature.items())} {sorted(constexprs.items())} {options}"
        self.seen[key] = (kernel, signature, constexprs, attributes, options)


def record_all(launches: Launches, dtype: torch.dtype) -> None:
    """Call the wrappers with the shapes of real models."""
    for module in (paged_attention, elementwise, grouped_moe):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            kernel = getattr(module, name)
            if isinstance(kernel, triton.runtime.JITFunction):
                setattr(module, name, launches.record(kernel))
    for key_dim, value_dim, heads, kv_heads, window, sinks in (
        (192, 128, 64, 4, None, False),
        (192, 128, 64, 8, 128, True),
        (256, 256, 4, 1, 511, False),
        (64, 64, 64, 8, 127, True),
    ):
        spec = AttentionSpec(heads, kv_heads, key_dim, value_dim, 0.1, RopeSpec(1e4, 64), window, sinks)
        attention(spec, dtype)
    kernels = TritonKernels()
    x = torch.empty(5, 2880, dtype=dtype)
    kernels.rms_norm(x, torch.empty(2880), 1e-6)
    kernels.add_rms_norm(x, x, torch.empty(2880), 1e-6)
    qk = torch.empty(5, 72, 192, dtype=dtype)
    kernels.rms_norm(qk, torch.empty(72, 192), 1e-6)
    kernels.rotate(qk, torch.empty(5, 1, 32, dtype=dtype), torch.empty(5, 1, 32, dtype=dtype))
    for name in ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"):
        kernels.gated(x, name)
    up, down = torch.empty(8, 2 * 96, 2880, dtype=dtype), torch.empty(8, 2880, 96, dtype=dtype)
    for tokens in (2, 80, 900):
        x = torch.empty(tokens, 2880, dtype=dtype)
        plain = MoeSpec(8, 3, 96, "silu", "sigmoid", selection_bias=True)
        kernels.moe(plain, x, torch.empty(tokens, 8), MoeParameters(up, down, torch.empty(8)))
        biased = MoeSpec(8, 3, 96, "quick_gelu", "softmax", bias=True, limit=7.0, up_offset=1.0)
        biases = MoeParameters(up, down, None, torch.empty(8, 192, dtype=dtype), torch.empty(8, 2880, dtype=dtype))
        kernels.moe(biased, x, torch.empty(tokens, 8), biases)


def attention(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """A chunk and two decodes, with one split and with several."""
    layer = LayerKV(
        torch.empty(40, 16, spec.num_kv_heads, spec.key_dim, dtype=dtype),
        torch.empty(40, 16, spec.num_kv_heads, spec.value_dim, dtype=dtype),
    )
    table = torch.zeros(3, 20, dtype=torch.int64)
    group = GroupBatch(table, [0, 0, 0], [0, 0, 0], torch.zeros(42, dtype=torch.int64), [layer])
    ids = torch.zeros(42, dtype=torch.int64)
    batch = ForwardBatch(ids, ids, [0, 1, 2, 42], [300, 20, 40], 16, group, group)
    sinks = torch.empty(spec.num_heads) if spec.sinks else None
    q = torch.empty(42, spec.num_heads, spec.key_dim, dtype=dtype)
    k = torch.empty(42, spec.num_kv_heads, spec.key_dim, dtype=dtype)
    v = torch.empty(42, spec.num_kv_heads, spec.value_dim, dtype=dtype)
    for splits in (1, tiles.MAX_SPLITS):
        tiles.num_splits = lambda *_, s=splits: s  # type: ignore[assignment]
        backend = triton_paged.TritonBackend()
        backend.attend(spec, q, k, v, sinks, backend.plan(spec, batch, group), layer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    arguments = parser.parse_args()
    # Nothing runs, so there need be no GPU.
    triton_paged.require_triton = lambda: None  # type: ignore[attr-defined]
    triton_paged._check = lambda cache: None
    launches = Launches()
    record_all(launches, getattr(torch, arguments.dtype))
    for kernel, signature, constexprs, attributes, options in launches.seen.values():
        for architecture in arguments.architectures:
            source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            print(kernel.fn.__name__, architecture, compiled.metadata.shared, flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
