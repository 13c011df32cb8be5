"""What operators ask this process: probes, version, metrics."""

from importlib import metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.dependencies import ERRORS, FromUpstream
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.replies import LoadReply, StatusReply, VersionReply
from gateway.router_metrics import router_metrics

router = APIRouter(responses={"5XX": ERRORS["5XX"]})


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(upstream: FromUpstream) -> StatusReply:
    """200 when requests can be served: the router has a model ready and this process is not shutting down."""
    await upstream.check_serving()
    return StatusReply()


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
async def livez() -> StatusReply:
    """200 while this process runs, whatever the router does."""
    return StatusReply()


@router.get("/version")
async def version() -> VersionReply:
    """Quire's version; "unknown" when it runs from a source tree that is not installed."""
    try:
        return VersionReply(version=metadata.version("quire"))
    except metadata.PackageNotFoundError:
        return VersionReply(version="unknown")


@router.get("/load")
async def load(request: Request) -> LoadReply:
    """How busy this gateway is, all its processes together, for who spreads requests over several."""
    own: Metrics = request.app.state.metrics
    return LoadReply(server_load=own.num_running())


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request, upstream: FromUpstream) -> Response:
    """This process's metrics and its router's, in Prometheus' text format."""
    own: Metrics = request.app.state.metrics
    return Response(own.expose() + await router_metrics(upstream), media_type=CONTENT_TYPE)
