"""The routers that `router.py` compares, started as processes; and the CPU time that they take."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent.parent / ".peers"
PEER_ROUTERS = ("sglang-router", "smg", "vllm-router")
"""Those that `peers.py` installs, with their own cache-aware policy."""

TICKS = os.sysconf("SC_CLK_TCK")
ROUTER_CPU, LOAD_CPU = 0, 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(cpu: int) -> Callable[[], None] | None:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    return (lambda: os.sched_setaffinity(0, {cpus[cpu]})) if len(cpus) > 1 else None


@contextmanager
def process(command: list[str], cpu: int, **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen(command, preexec_fn=pinned(cpu), **more)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for(port: int, path: str = "/health") -> None:
    """Until GET `path` answers 200."""
    import http.client

    end = time.monotonic() + 20
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise SystemExit(f"nothing answers on port {port}")
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    total = 0.0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (str(pid), *children):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 8m; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream workers {{ {servers} keepalive 64; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


def peer_binary(name: str) -> Path:
    """Where `peers.py` puts a peer's program."""
    return PEERS / name / "bin" / name


@contextmanager
def target(name: str, workers: list[int], redis_port: int | None, folder: Path) -> Iterator[tuple[int, int | None]]:
    """Port to send to, and the pid whose CPU counts."""
    if name == "direct":
        yield workers[0], None
        return
    port = free_port()
    if name == "nginx":
        own = folder / "nginx"
        own.mkdir()
        servers = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
        conf = own / "nginx.conf"
        conf.write_text(NGINX.format(folder=own, port=port, servers=servers))
        command = ["nginx", "-p", str(own), "-c", str(conf)]
    elif name == "relay":
        command = [sys.executable, str(Path(__file__).parent / "router_load.py"), "relay", str(port), str(workers[0])]
    elif name in PEER_ROUTERS:
        command = [str(peer_binary(name)), *([] if name == "vllm-router" else ["launch"])]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--policy", "cache_aware", "--api-key", "key", "--max-payload-size", str(64 << 20)]
        command += ["--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in workers)]
    else:
        command = [sys.executable, "-m", "cygnet.cli.main", "router", "--port", str(port), "--api-key", "key"]
        command += ["--policy", "round_robin" if name == "cygnet rr" else "cache_aware"]
        for worker in workers:
            command += ["--worker", f"http://127.0.0.1:{worker}"]
        if name == "cygnet redis":
            command += ["--redis", f"redis://127.0.0.1:{redis_port}"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["env"] = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1"}  # peers would look for a tokenizer there
    with process(command, ROUTER_CPU, **quiet) as child:
        wait_for(port, "/v1/models" if name in ("nginx", "relay") else "/health" if name in PEER_ROUTERS else "/ready")
        yield port, child.pid
