"""``python grpc_ready.py HOST:PORT SERVICE``: a container's health check. Exits 0 when the server says SERVING.

Asks ``grpc.health.v1`` once; else a line on stderr, which the engine keeps, says why, and the status is 1.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.channel import CHANNEL_OPTIONS

_TIMEOUT_S = 3.0


def main() -> int:
    """Returns the process's exit status."""
    address, service = sys.argv[1:]
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S).status
        except grpc.RpcError as error:
            sys.stderr.write(f"{address} gives no answer about {service}: {error.code().name}, {error.details()}\n")
            return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(f"{service} at {address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
