"""A small OpenAI-compatible server in a thread: answers word by word, remembers what it was asked, fails on demand."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does; tests change it before they ask."""

    takes_token_ids: bool = True
    tokenizes: bool = True
    has_chat_template: bool = True
    has_metrics: bool = True
    kind: str | None = None
    api_key: str = ""
    max_model_len: int | None = 4096
    refuse_with: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By request number (from 0, generation requests only): HTTP status and message."""
    cache: Any = None
    """What `/cache` answers."""
    flushed: Any = None
    """What `/reset_prefix_cache` answers."""
    cut: set[int] = field(default_factory=set)
    """Requests whose stream breaks off after the first word."""
    hold: threading.Event | None = None
    """When set to an event, answers wait for it."""


class FakeOpenAI:
    """`with FakeOpenAI() as server:` then ask at `server.url`."""

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.get(self)

            def do_POST(self) -> None:
                fake.post(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> "FakeOpenAI":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- what handlers do

    def get(self, http: BaseHTTPRequestHandler) -> None:
        if self._unauthorized(http):
            return
        if http.path == "/v1/models":
            card = {"id": "fake", "object": "model", "max_model_len": self.behaviour.max_model_len}
            if self.behaviour.kind:
                card["kind"] = self.behaviour.kind
            _json(http, 200, {"object": "list", "data": [card]})
        elif http.path == "/metrics" and self.behaviour.has_metrics:
            hits = sum(len(request["prompt_ids"]) // 2 for request in self.requests)
            page = (
                "# HELP vllm:prefix_cache_hits_total x\n# TYPE vllm:prefix_cache_hits_total counter\n"
                f'vllm:prefix_cache_hits_total{{model_name="fake"}} {hits}\n'
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
                f"# TYPE python_gc_total counter\npython_gc_total {len(self.requests)}\n"
            )
            _reply(http, 200, page.encode(), "text/plain")
        elif http.path.startswith("/cache?") and self.behaviour.cache is not None:
            self.paths.append(http.path)
            _json(http, 200, self.behaviour.cache)
        else:
            _error(http, 404, "not found")

    def post(self, http: BaseHTTPRequestHandler) -> None:
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])) or b"{}")
        if self._unauthorized(http):
            return
        if http.path.startswith("/reset_prefix_cache") and self.behaviour.flushed is not None:
            self.paths.append(http.path)
            _json(http, 200, self.behaviour.flushed)
            return
        if http.path == "/tokenize" and self.behaviour.tokenizes:
            _json(http, 200, {"tokens": [5000 + len(word) for word in body["prompt"].split()], "count": 0})
            return
        if http.path not in ("/v1/completions", "/v1/chat/completions"):
            _error(http, 404, "not found")
            return
        with self._lock:
            number = len(self.requests)
            self.requests.append({**body, "prompt_ids": body.get("prompt") or body.get("messages")})
            self.paths.append(http.path)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            self._generate(http, body, number)
        finally:
            with self._lock:
                self._running -= 1

    def _generate(self, http: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
        behaviour, chat = self.behaviour, http.path.endswith("chat/completions")
        if behaviour.hold is not None:
            behaviour.hold.wait(10)
        if number in behaviour.refuse_with:
            _error(http, *behaviour.refuse_with[number])
        elif not chat and isinstance(body["prompt"], list) and not behaviour.takes_token_ids:
            _error(http, 400, "prompt must be a string")
        elif chat and not behaviour.has_chat_template:
            _error(http, 400, "fake has no chat template; use /v1/completions", code="no_chat_template")
        else:
            _stream(http, self._events(body, chat), cut=number in behaviour.cut)

    def _events(self, body: dict[str, Any], chat: bool) -> Iterator[str]:
        prompt = body["messages"] if chat else body["prompt"]
        num_prompt = len(prompt) if isinstance(prompt, list) and not chat else len(str(prompt).split())
        if chat:
            yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        num_tokens = min(body["max_tokens"], 6) if not body.get("ignore_eos") else body["max_tokens"]
        for index in range(num_tokens):
            word = f" word{index}"
            piece = {"delta": {"content": word}} if chat else {"text": word}
            yield json.dumps({"choices": [{"index": 0, **piece, "finish_reason": None}]})
        end = {"delta": {}} if chat else {"text": ""}
        yield json.dumps({"choices": [{"index": 0, **end, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        }
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"

    def _unauthorized(self, http: BaseHTTPRequestHandler) -> bool:
        wanted = self.behaviour.api_key
        if not wanted or http.headers["Authorization"] == f"Bearer {wanted}":
            return False
        _error(http, 401, "wrong or missing API key")
        return True


def _reply(http: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
    http.send_response(status)
    http.send_header("Content-Type", kind)
    http.send_header("Content-Length", str(len(body)))
    http.end_headers()
    http.wfile.write(body)


def _json(http: BaseHTTPRequestHandler, status: int, body: object) -> None:
    _reply(http, status, json.dumps(body).encode(), "application/json")


def _error(http: BaseHTTPRequestHandler, status: int, message: str, code: str | None = None) -> None:
    _json(http, status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


def _stream(http: BaseHTTPRequestHandler, events: Iterator[str], *, cut: bool) -> None:
    http.send_response(200)
    http.send_header("Content-Type", "text/event-stream")
    http.send_header("Transfer-Encoding", "chunked")
    http.end_headers()
    try:
        for number, event in enumerate(events):
            data = f"data: {event}\n\n".encode()
            http.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            if cut and number == 0:
                http.close_connection = True
                return
        http.wfile.write(b"0\r\n\r\n")
    except (BrokenPipeError, ConnectionResetError):
        http.close_connection = True
