"""What every route may ask for: the connection to the router, the settings; and what each says of its errors."""

from typing import Annotated, Any

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request

from gateway.config import GatewayConfig
from gateway.replies import ErrorReply
from gateway.upstream import Upstream

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorReply, "description": "The request may succeed later."},
}


async def upstream_of(request: Request) -> Upstream:
    """The app's connection to the router. Async only because FastAPI would run it in a thread otherwise."""
    upstream: Upstream = request.app.state.upstream
    return upstream


def config_of(request: Request) -> GatewayConfig:
    """The app's settings."""
    config: GatewayConfig = request.app.state.config
    return config


FromUpstream = Annotated[Upstream, Depends(upstream_of)]


def replies(whole: type[BaseModel], event_schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an endpoint that streams on request."""
    return {
        200: {"model": whole, "description": description, "content": {"text/event-stream": {"schema": event_schema}}}
    }
