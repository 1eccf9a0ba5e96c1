"""llama.cpp for `engine.py`: --threads N --model FILE.gguf --bin FOLDER.

Prefill and decode at short contexts are measured by its own `llama-batched-bench`, which runs the model alone: no
server, no sampling. What needs cached prompts is asked of its `llama-server`.
"""

import argparse
import json
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from time import perf_counter
from typing import Any

from worker import Prompt, serve

PORT = 18931
SLOTS, SLOT_TOKENS = 8, 9216
START_S = 120


class LlamaCpp:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._bin = Path(options.bin)
        if not (self._bin / "llama-server").exists():
            raise FileNotFoundError(f"no llama-server in {self._bin}: run `make peers`")
        self._server: subprocess.Popen[bytes] | None = None

    def prefill(self, prompt: Prompt) -> float:
        (row,) = self._bench(len(prompt), 1, [1])
        return float(row["t_pp"])

    def decode(self, prompts: list[Prompt], steps: int) -> float:
        context, batch = len(prompts[0]), len(prompts)
        if context <= 1024:
            (row,) = self._bench(context, steps, [batch])
            return float(row["t_tg"]) / steps
        return self._decode_in_server(prompts, steps)

    def first_token(self, prompts: list[Prompt], steps: int) -> float:
        started = perf_counter()
        self._together([{"prompt": prompt, "n_predict": steps} for prompt in prompts])
        return perf_counter() - started

    def warm(self, prompts: list[Prompt]) -> None:
        for slot, prompt in enumerate(prompts):
            self._complete({"prompt": prompt, "n_predict": 1, "id_slot": slot})

    def facts(self) -> dict[str, Any]:
        shown = subprocess.run([self._bin / "llama-server", "--version"], capture_output=True, text=True, check=False)
        lines = (shown.stderr + shown.stdout).splitlines()
        version = next((line for line in lines if line.startswith("version")), "unknown")
        memory = 0 if self._server is None else status_kib(self._server.pid) * 1024
        return {"version": version, "model": Path(self._options.model).name, "resident_bytes": memory}

    def _bench(self, prompt_tokens: int, steps: int, batches: list[int]) -> list[dict[str, Any]]:
        room = max(batches) * (prompt_tokens + steps) + 256
        command = [
            str(self._bin / "llama-batched-bench"), "-m", self._options.model, "-c", str(room), "-b", "2048",
            "-ub", "512", "-npp", str(prompt_tokens), "-ntg", str(steps), "-npl", ",".join(map(str, batches)),
            "-t", str(self._options.threads), "-fa", "on", "--output-format", "jsonl",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if len(rows) != len(batches):
            raise RuntimeError(f"llama-batched-bench failed ({run.returncode}): {run.stderr[-2000:]}")
        return rows

    def _decode_in_server(self, prompts: list[Prompt], steps: int) -> float:
        """Each prompt keeps its slot. Timed from the last first token to the first end, as tokens arrive."""
        arrivals: list[list[float]] = [[] for _ in prompts]
        requests: list[dict[str, Any]] = [
            {"prompt": prompt, "n_predict": steps + 8, "id_slot": slot} for slot, prompt in enumerate(prompts)
        ]
        self._together(requests, arrivals)
        begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        tokens = sum(sum(begin < at <= end for at in times) for times in arrivals)
        return (end - begin) * len(prompts) / tokens

    def _together(self, requests: list[dict[str, Any]], arrivals: list[list[float]] | None = None) -> None:
        self._started_server()
        faults: list[Exception] = []

        def one(index: int) -> None:
            try:
                self._complete(requests[index], None if arrivals is None else arrivals[index])
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    def _complete(self, request: dict[str, Any], arrivals: list[float] | None = None) -> None:
        port = self._started_server()
        body = {
            "cache_prompt": True, "temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True,
            "stream": arrivals is not None, **request,
        }  # fmt: skip
        call = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=900) as reply:
            if arrivals is None:
                reply.read()
                return
            for line in reply:
                if line.startswith(b"data:"):
                    arrivals.append(perf_counter())

    def _started_server(self) -> int:
        if self._server is not None:
            return PORT
        command = [
            str(self._bin / "llama-server"), "-m", self._options.model, "-c", str(SLOTS * SLOT_TOKENS),
            "-np", str(SLOTS), "-b", "2048", "-ub", "512", "-t", str(self._options.threads), "-fa", "on",
            "--port", str(PORT), "--no-webui",
        ]  # fmt: skip
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = perf_counter() + START_S
        while perf_counter() < deadline:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode}: {' '.join(command)}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return PORT
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready in {START_S} s")

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def status_kib(pid: int) -> int:
    """Resident KiB of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bin", required=True)
    options = parser.parse_args()
    subject = None

    def load() -> LlamaCpp:
        global subject
        subject = LlamaCpp(options)
        return subject

    try:
        serve(load)
    finally:
        if subject is not None:
            subject.close()
