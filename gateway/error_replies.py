"""Error objects as HTTP responses."""

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from gateway.errors import ApiError


def error_reply(scope: Scope, error: ApiError) -> Response:
    """The answer to the request of this scope."""
    headers = error.headers()
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)
