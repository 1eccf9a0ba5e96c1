"""A subject of a benchmark in a process of its own, asked over its standard input (`engine_workers/worker.py`)."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPIN_COUNT = "10000"
"""Of OpenMP threads that wait, for every engine: what `cygnet serve` sets for its own."""


class Worker:
    """An engine in its process."""

    def __init__(self, name: str, command: list[str | Path], variables: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "GOMP_SPINCOUNT": SPIN_COUNT, **variables},
            )
        self._read()

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its log is {self._log}")
        answer = json.loads(line)
        if not isinstance(answer, dict) or "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
