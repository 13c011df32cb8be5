"""The two ways to the servers of a stack, by name: gRPC, and completions over the gateway's server-sent events."""

from collections.abc import Callable

from quire.bench.fronts import Front, GrpcFront, HttpFront


def _sse(address: str, model: str) -> Front:
    return HttpFront(f"http://{address}/v1", model, "completions")


# Of an address, host:port, and what the server calls its model.
FRONTS: dict[str, Callable[[str, str], Front]] = {"gRPC": GrpcFront, "SSE": _sse}
