"""Runs the files of `interpreted/` in one process in which Triton interprets its kernels on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cygnet.model.kernels import interpreted, triton_available

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.skipif(interpreted(), reason="TRITON_INTERPRET is set: the files are collected directly")
@pytest.mark.skipif(not triton_available(), reason="triton is not installed (extra: gpu)")
def test_in_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
