"""The application: routes, layers and error formats put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cygnet.api import openapi
from cygnet.api.card import ModelCard
from cygnet.api.chat import prepare_chat
from cygnet.api.completions import prepare_completion
from cygnet.api.endpoint import GenerationEndpoint
from cygnet.api.errors import HttpError, http_error, to_http
from cygnet.api.gateway import Gateway
from cygnet.api.record import Record
from cygnet.api.routes import PAGE_HEADERS, STATIC, Routes
from cygnet.api.service import Service
from cygnet.api.state import StateStream
from cygnet.api.tokenization import Tokenizer
from cygnet.base.config import ApiSettings
from cygnet.base.engine_client import EngineClient
from cygnet.base.errors import CygnetError
from cygnet.metrics.catalogue import HTTP_REQUESTS


class _PageFiles(StaticFiles):
    """The page's files, always revalidated, so that an upgrade shows at once."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update(PAGE_HEADERS)
        return response


def create_app(engine: EngineClient, tokenizer: Tokenizer, settings: ApiSettings, card: ModelCard) -> Starlette:
    """An ASGI application that serves `engine`. The engine stays the caller's: close it after the server has ended.

    `app.state.service` is the `Service`; its `lifecycle` is what a server uses to drain (see `cygnet.api.server`).
    """
    service = Service(engine, tokenizer, settings, card)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.pool.close()

    def finished(record: Record) -> None:
        service.recorder.add(HTTP_REQUESTS, (record.route, str(record.final_status)))

    layers = [
        Middleware(
            Gateway,
            api_key=settings.api_key,
            cors_origins=settings.cors_origins,
            log_requests=settings.log_requests,
            finished=finished,
        )
    ]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-fields", "retry-after"],
        )
        layers.insert(0, cors)
    app = Starlette(
        routes=_routes(service),
        middleware=layers,
        exception_handlers={HTTPException: _http_exception, CygnetError: _cygnet_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route | Mount]:
    small = Routes(service, openapi.build(needs_key=bool(service.settings.api_key)))
    return [
        Route("/v1/chat/completions", GenerationEndpoint(service, prepare_chat), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(service, prepare_completion), methods=["POST"]),
        Route("/v1/models", small.models),
        Route("/v1/models/{model:path}", small.model),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health),
        Route("/metrics", small.metrics),
        Route("/version", small.version),
        Route("/cache", small.cache),
        Route("/kv/events", service.kv_events, methods=["GET"]),
        Route("/reset_prefix_cache", small.reset_prefix_cache, methods=["POST"]),
        Route("/api/state", small.state),
        Route("/api/state/stream", StateStream(service), methods=["GET"]),
        Route("/openapi.json", small.openapi),
        Route("/docs", small.docs),
        Route("/", small.page),
        Route("/favicon.ico", small.favicon),
        Mount("/static", _PageFiles(directory=STATIC), name="static"),
    ]


def _respond(error: HttpError) -> Response:
    body = msgspec.json.encode(error.body)
    return Response(body, error.status, headers=dict(error.headers), media_type="application/json")


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same format as everything else."""
    assert isinstance(error, HTTPException)
    headers = tuple((error.headers or {}).items())
    path = request.scope["path"][:200]
    if error.status_code == 404:
        return _respond(http_error(404, f"no such path: {path!r}", code="not_found"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed here; {path!r} takes {dict(headers).get('Allow', 'other methods')}"
        return _respond(http_error(405, message, code="method_not_allowed", headers=headers))
    return _respond(http_error(error.status_code, str(error.detail), headers=headers))


async def _cygnet_error(request: Request, error: Exception) -> Response:
    return _respond(to_http(error))
