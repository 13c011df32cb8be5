"""Error objects as HTTP responses: OpenAI's, and Anthropic's where its API was asked."""

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from gateway.errors import ApiError

_MESSAGES_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_reply(scope: Scope, error: ApiError) -> Response:
    """The answer to the request of this scope."""
    path = scope["path"]
    of_messages = path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")
    headers = error.headers()
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(messages_error(error) if of_messages else error.body(), error.status, headers)


def messages_error(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object, which has no field for the parameter: the message names it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
