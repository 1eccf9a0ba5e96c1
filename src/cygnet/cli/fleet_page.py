"""The status of a local fleet over HTTP: a page for people at `/`, the same as JSON at `/status`."""

import asyncio
import time
from contextlib import suppress
from html import escape
from typing import Any

import msgspec

from cygnet.cli.fleet import Fleet

MAX_HEAD = 16384
READ_S = 10.0

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Cygnet fleet</title>
<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="2"><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; padding: .3rem .7rem; white-space: nowrap }}
tr {{ border-bottom: 1px solid #8884 }} .ready {{ color: #178a3a }} .waiting, .starting, .stopping {{ color: #b26a00 }}
td.line {{ font: 12px monospace; width: 100%; max-width: 0; overflow: hidden; text-overflow: ellipsis }}
</style></head><body><h1>Cygnet fleet</h1>
<table><tr><th>part<th>state<th>for<th>restarts<th>process<th>address<th>last line</tr>{rows}</table></body></html>"""


def status(fleet: Fleet) -> list[dict[str, Any]]:
    """What each part does."""
    now = time.monotonic()
    return [
        {
            "name": child.part.name,
            "state": child.state,
            "for_s": round(now - child.since, 1),
            "restarts": child.restarts,
            "pid": child.pid,
            "url": child.part.url,
            "last_line": child.last_line,
        }
        for child in fleet.children
    ]


def page(fleet: Fleet) -> str:
    """The page for people; it loads itself again every two seconds."""
    rows = ""
    for part in status(fleet):
        url = escape(part["url"])
        link = f'<a href="{url}">{url}</a>' if url.startswith("http") else url
        rows += (
            f'<tr><td>{escape(part["name"])}<td class="{part["state"]}">{part["state"]}<td>{part["for_s"]:.0f} s'
            f'<td>{part["restarts"]}<td>{part["pid"] or ""}<td>{link}<td class="line">{escape(part["last_line"])}</tr>'
        )
    return PAGE.format(rows=rows)


async def serve_status(fleet: Fleet, host: str, port: int) -> asyncio.Server:
    """Serve until closed. Raises `OSError` when the address can't be had."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                path = rest.split(b" ", 1)[0].partition(b"?")[0]
                if method not in (b"GET", b"HEAD") or path not in (b"/", b"/status"):
                    writer.write(_response("404 Not Found", "text/plain", b"see / and /status\n"))
                elif path == b"/":
                    writer.write(_response("200 OK", "text/html; charset=utf-8", page(fleet).encode()))
                else:
                    body = msgspec.json.encode({"parts": status(fleet)})
                    writer.write(_response("200 OK", "application/json", body))
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    return await asyncio.start_server(answer, host, port, limit=MAX_HEAD)


def _response(line: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {line}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
