"""The small endpoints: models, tokenize, health, metrics, cache reset, version, page and docs."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cygnet.api.body import parse, parse_query, read_body
from cygnet.api.chat import encode_chat
from cygnet.api.params import check_ids, check_model
from cygnet.api.responses import DetokenizeResponse, FlushResponse, ModelList, ModelObject, TokenizeResponse
from cygnet.api.schemas import CacheQuery, DetokenizeRequest, FlushQuery, TokenizeRequest
from cygnet.api.service import Service
from cygnet.api.state import snapshot
from cygnet.base.errors import EngineDeadError, InvalidRequestError
from cygnet.version import __version__

STATIC = Path(__file__).parent / "static"
ANSWER_TIMEOUT_S = 30.0

T = TypeVar("T")

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def json_response(body: Any, status: int = 200) -> Response:
    """`body` (anything msgspec encodes) as a response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _answered(answer: Awaitable[T]) -> T:
    """The engine's answer, which comes between two steps. `EngineDeadError` where it takes too long."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer
    except TimeoutError:
        raise EngineDeadError(f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s") from None


class Routes:
    """Handlers over one service."""

    def __init__(self, service: Service, openapi: dict[str, Any]) -> None:
        self._service = service
        self._openapi = msgspec.json.encode(openapi)

    async def models(self, request: Request) -> Response:
        """The list of the one model."""
        return json_response(ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        """One model by name."""
        check_model(request.path_params["model"], self._service.card.id)
        return json_response(self._model())

    def _model(self) -> ModelObject:
        card = self._service.card
        return ModelObject(
            id=card.id,
            created=card.created,
            owned_by=card.owned_by,
            root=card.root or card.id,
            max_model_len=self._service.limits.max_model_len,
            kind=card.kind,
        )

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._service.settings.max_body_bytes)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation, as the generation endpoints would make them."""
        body = await self._body(request)
        asked, _ = await self._service.pool.parse(body, lambda: parse(body, TokenizeRequest))
        check_model(asked.model, self._service.card.id)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if asked.messages is not None:
            ids = await encode_chat(
                self._service,
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt is not False,
                template_kwargs=asked.chat_template_kwargs,
                add_special_tokens=bool(asked.add_special_tokens),
            )
        else:
            special = asked.add_special_tokens is not False
            ids = await self._service.pool.encode(asked.prompt or "", add_special_tokens=special)
        texts = [self._service.tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
        return json_response(TokenizeResponse(len(ids), self._service.limits.max_model_len, ids, texts))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await self._body(request)
        asked, _ = await self._service.pool.parse(body, lambda: parse(body, DetokenizeRequest))
        check_model(asked.model, self._service.card.id)
        ids = check_ids(asked.tokens, self._service.limits, "tokens")
        text = await self._service.pool.decode(ids, skip_special_tokens=bool(asked.skip_special_tokens))
        return json_response(DetokenizeResponse(text))

    async def health(self, request: Request) -> Response:
        """200 while new requests are served, 503 when the engine is dead or the server drains."""
        if self._service.healthy:
            return json_response({"status": "ok"})
        state = "draining" if self._service.lifecycle.draining.is_set() else "engine is not running"
        return json_response({"status": state}, 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        body, content_type = self._service.exposition.render()
        return Response(body, headers={"content-type": content_type})

    async def cache(self, request: Request) -> Response:
        """What is cached where."""
        asked = parse_query(request.query_params, CacheQuery)
        return json_response(await _answered(self._service.engine.inspect_cache(asked.limit)))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop every cached block that no running request holds."""
        store = parse_query(request.query_params, FlushQuery).store
        if store and "store" not in self._service.engine.ready.tiers:
            raise InvalidRequestError("this server has no store (serve with --store); leave store out", param="store")
        return json_response(FlushResponse(await _answered(self._service.engine.flush_cache(store=store))))

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def state(self, request: Request) -> Response:
        """One snapshot."""
        return json_response(snapshot(self._service))

    async def openapi(self, request: Request) -> Response:
        """The API's description."""
        return Response(self._openapi, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """The playground."""
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)

    async def docs(self, request: Request) -> Response:
        """The API's description for people."""
        return FileResponse(STATIC / "docs.html", headers=PAGE_HEADERS)

    async def favicon(self, request: Request) -> Response:
        """The page's icon."""
        return FileResponse(STATIC / "icon.svg", headers=PAGE_HEADERS)
