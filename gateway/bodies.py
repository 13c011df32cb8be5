"""Reads request bodies: media type, size, time, JSON; and says what is wrong with one in OpenAI's words."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.errors import ApiError, ClientGone, invalid
from gateway.request_limits import RequestLimits
from gateway.size_check import check_depth

Model = TypeVar("Model", bound=BaseModel)

_MAX_PARAM_LENGTH = 256

_TYPES_OF_OBJECTS = frozenset(("model_type", "model_attributes_type", "dict_type"))


class JsonRoute(APIRoute):
    """A route whose body is checked before FastAPI reads it, since FastAPI has neither our limits nor our errors.

    The limits are ``app.state.limits``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a request whose body is read, if the route takes one."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def read_first(request: Request) -> Response:
            return await handler(await _Json.read(request, request.app.state.limits))

        return read_first


class _Json(Request):
    """A request whose body has been read and parsed."""

    def __init__(self, request: Request, raw: bytes, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._parsed = parsed

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._parsed

    @classmethod
    async def read(cls, request: Request, limits: RequestLimits) -> "_Json":
        """Raises ApiError (400, 408, 413, 415) and ClientGone."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(415, "The body must be JSON, with the header Content-Type: application/json.")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(415, f"The body must be plain JSON: Content-Encoding {encoding[:32]} is not supported.")
        try:
            async with asyncio.timeout(limits.body_timeout):
                raw = await _read(request, limits.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {limits.body_timeout} seconds.") from None
        except ClientDisconnect:
            raise ClientGone from None
        try:
            parsed = from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            # The parser's own words tell a place and no more than that.
            raise invalid(None, f"The body is not valid JSON: {error}.") from None
        check_depth(raw, parsed, limits.max_json_depth)
        return cls(request, raw, parsed)


async def _read(request: Request, limit: int) -> bytes:
    too_long = ApiError(413, f"The body is longer than {limit} bytes.", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_long
    pieces: list[bytes] = []
    length = 0
    async for piece in request.stream():
        length += len(piece)
        if length > limit:
            raise too_long
        pieces.append(piece)
    return b"".join(pieces)


def validated(model: type[Model], fields: dict[str, Any]) -> Model:
    """A body made of these fields. Raises ApiError (400) that names the first field that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise from_validation(RequestValidationError(errors, body=fields)) from None


def from_validation(error: RequestValidationError) -> ApiError:
    """The 400 for a body that does not fit its model; names the first field that is wrong."""
    first = error.errors()[0]
    param = _path(first["loc"][1:], error.body)
    if first["type"] in _TYPES_OF_OBJECTS:
        message = "Input should be a JSON object"
    elif first["type"] == "missing":
        message = "this field is required" if param else "The body must be a JSON object"
    else:
        message = first["msg"].removeprefix("Value error, ")
    return invalid(param, f"{param}: {message}" if param else message)


def _path(steps: Sequence[int | str], value: Any) -> str | None:
    """The dotted path of a field, as the client would write it.

    pydantic puts names of union members between the steps; they are told by where they stand: at what is no object, or
    before the last step at an object without such a field.
    """
    path: list[str] = []
    for place, step in enumerate(steps):
        if isinstance(value, dict) and isinstance(step, str):
            if step not in value and place < len(steps) - 1:
                continue
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if step < len(value) else None
        else:
            continue
        path.append(str(step))
    return ".".join(path)[:_MAX_PARAM_LENGTH] or None
