"""Puts the app together: routes, errors, layers, and the lifespan that owns the connection to the router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway import page_routes, routes, service_routes
from gateway.access.guard import Guard, KeyRing
from gateway.bodies import from_validation
from gateway.config import ConfigError, GatewayConfig
from gateway.edge import Edge
from gateway.error_replies import error_reply
from gateway.errors import INVALID_REQUEST, SERVER_ERROR, ApiError
from gateway.generation import ROUTE_HEADERS
from gateway.messages import routes as messages
from gateway.metrics import Metrics
from gateway.output_policy.pattern import PatternError
from gateway.replies import ChatCompletionChunk, CompletionChunk
from gateway.responses import routes as responses
from gateway.upstream import Upstream
from protos.tracing import Tracing


def create_app(config: GatewayConfig) -> FastAPI:
    """The ASGI app. ``app.state.upstream`` is there while the lifespan runs; ``app.state.tracing`` may be replaced
    before.

    Raises:
        ConfigError: a key's output policy has a pattern that cannot be used.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # gRPC's channel belongs to the loop it is made in.
        app.state.upstream = Upstream(config, app.state.metrics)
        try:
            yield
        finally:
            await app.state.upstream.close()

    app = _App(title="Quire", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = Metrics()
    app.state.tracing = Tracing()
    app.state.config = config
    app.state.limits = config.limits
    app.include_router(routes.router)
    app.include_router(responses.router)
    app.include_router(messages.router)
    app.include_router(service_routes.router)
    app.include_router(page_routes.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # The last one added is the first one asked.
    if config.api_keys:
        app.add_middleware(Guard, ring=_key_ring(config))
    app.add_middleware(Edge, metrics=app.state.metrics, max_header_bytes=config.limits.max_header_bytes)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-quire-ignored-fields", *ROUTE_HEADERS],
        )
    return app


def _key_ring(config: GatewayConfig) -> KeyRing:
    try:
        return KeyRing(config.api_keys)
    except PatternError as error:
        raise ConfigError(f"--api-keys-file has a banned pattern that cannot be used: {error}") from error


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's document, with the chunks of streams, which no route returns as a model."""
        if self.openapi_schema is None:
            document = super().openapi()
            _, definitions = models_json_schema(
                [(ChatCompletionChunk, "serialization"), (CompletionChunk, "serialization")],
                ref_template="#/components/schemas/{model}",
            )
            schemas = document["components"]["schemas"]
            for name, schema in definitions["$defs"].items():
                schemas.setdefault(name, schema)
        return super().openapi()


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_reply(request.scope, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(request.scope, from_validation(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: an unknown path, a method that the path has not."""
    assert isinstance(error, HTTPException)
    kind = INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR
    message = f"{error.detail}: {request.method} {request.url.path}"
    answer = error_reply(request.scope, ApiError(error.status_code, message, type=kind))
    answer.headers.update(error.headers or {})
    return answer
