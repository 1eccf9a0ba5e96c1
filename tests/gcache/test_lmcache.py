"""GCache inside LMCache, where that is installed: LMCache's own harness stores, looks up and loads through it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from support.gcache import MIB, server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is None,
    reason="needs LMCache: python benchmarks/peers.py lmcache, then that environment's python",
)


def test_lmcaches_own_benchmark_finds_every_byte() -> None:
    with server(256 * MIB) as running:
        adapter = {
            "type": "plugin",
            "module_path": "cygnet.integrations.lmcache",
            "class_name": "GCacheL2Adapter",
            "adapter_params": {"servers": f"127.0.0.1:{running.port}?timeout_s=20", "timeout_s": 20.0},
        }
        command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify", "--data-size-kb", "256"]
        command += ["--lookup-max-hit-rate", "0.5"]
        done = subprocess.run(
            [sys.executable, "-m", "lmcache.cli.main", *command],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "LMCACHE_TRACK_USAGE": "false"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        successes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("Total success:")]
        assert successes == [32, 16, 32], done.stdout  # of stores, lookups (half of them of what is there), loads
        assert "All 32 keys data verified OK" in done.stdout, done.stdout
