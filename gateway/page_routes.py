"""The built-in page, and what it shows of the fleet: workers, who waits and runs, KV blocks, prefix hits."""

from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.guard import PAGE_PATHS
from gateway.dependencies import ERRORS, FromUpstream
from gateway.fleet_reply import FleetReply, fleet_reply

router = APIRouter()

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
# The page may load and call nothing but this server, and nobody may put it into theirs.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # After an update the parts must not be of two versions.
    "cache-control": "no-cache",
}
_FOLDER = resources.files("gateway") / "page"


def _name(path: str) -> str:
    return path.rpartition("/")[2] or "index.html"


_PARTS = {path: (_FOLDER / _name(path)).read_bytes() for path in PAGE_PATHS}


async def _part(request: Request) -> Response:
    path = request.url.path
    return Response(_PARTS[path], media_type=_TYPES[_name(path).rpartition(".")[2]], headers=_HEADERS)


for _path in _PARTS:
    router.add_route(_path, _part, methods=["GET"], include_in_schema=False)


@router.get("/fleet", responses={"4XX": ERRORS["4XX"], "5XX": ERRORS["5XX"]})
async def fleet(upstream: FromUpstream) -> FleetReply:
    """What the router's workers are busy with, as of their last messages."""
    return fleet_reply(await upstream.get_load())
