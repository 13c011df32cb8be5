"""The router's metrics as the gateway's /metrics shows them, so that one address to scrape is enough."""

from gateway.errors import ApiError
from gateway.upstream import Upstream

_UP = b"# HELP quire_router_up 1: the router answered this scrape.\n# TYPE quire_router_up gauge\nquire_router_up %d\n"


async def router_metrics(upstream: Upstream) -> bytes:
    """The text of the router that ``upstream`` reaches; says so, and has nothing else, when it does not answer."""
    try:
        return _UP % 1 + await upstream.get_metrics()
    except ApiError:
        return _UP % 0
