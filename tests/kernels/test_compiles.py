"""Every kernel compiles for a GPU, with tiles that fit its shared memory. The GPU need not be there: nothing is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cygnet.model.kernels import triton_available

SHARED_MEMORY = 99 << 10
"""What a block may have on the smallest of NVIDIA's GPUs from sm_80 on (sm_86, sm_89)."""

KERNELS = {
    "write_kv_kernel",
    "prefill_kernel",
    "decode_kernel",
    "reduce_kernel",
    "rms_norm_kernel",
    "rotate_kernel",
    "gated_kernel",
    "route_kernel",
    "count_kernel",
    "sort_kernel",
    "grouped_gate_up_kernel",
    "grouped_down_kernel",
    "combine_kernel",
}


@pytest.mark.skipif(not triton_available(), reason="triton is not installed (extra: gpu)")
def test_every_kernel_compiles_and_fits() -> None:
    """For sm_80 in bf16, in a process without the interpreter. Other targets: see docs/gpu.md."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_all.py"
    command = [sys.executable, str(script), "--dtype", "bfloat16", "--architectures", "80"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = set()
    for line in done.stdout.splitlines():
        kernel, architecture, shared = line.split()
        seen.add(kernel)
        assert int(shared) <= SHARED_MEMORY, f"{kernel} takes {shared} bytes of shared memory on sm_{architecture}"
    assert seen == KERNELS
