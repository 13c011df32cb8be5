"""What both ends of a gRPC connection must choose together: message limits, keepalive, and whether it is TLS."""

from collections.abc import Sequence

import grpc

from protos.peer_names import PeerNames
from protos.tls import ClientTls, ServerTls

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # A second server on the same port must fail loudly instead of taking half the calls.
    ("grpc.so_reuseport", 0),
    # Clients may ping an idle connection every ten seconds without being sent away.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A proxy in the environment is for the outside world, not for what stands between our own processes.
    ("grpc.enable_http_proxy", 0),
    # A peer that accepts no connection fails a call within two seconds, not twenty.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A restarted peer is found again within a second, not after the default's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# What a worker's refusal of a stream has as metadata while its model is loaded: to come again at once is no burden.
LOADING = (("quire-state", "loading"),)

# For who streams answers: of a call that it does not read, so many bytes come, and the rest waits in the router, where
# it is bounded. Left to itself, gRPC widens this window to megabytes a call.
STREAM_WINDOW_BYTES = 64 * 1024

INFERENCE_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
]


def make_server(tls: ServerTls | None, *interceptors: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """A server without services; ``add_port`` with the same ``tls`` gives it a port."""
    names = [PeerNames(tls.client_names)] if tls is not None and tls.client_names else []
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=(*names, *interceptors))


def add_port(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    """Binds an address, and returns the port. Raises RuntimeError when it cannot be had."""
    if tls is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(tls.keyfile.read_bytes(), tls.certfile.read_bytes())],
        root_certificates=tls.ca_certs.read_bytes() if tls.ca_certs is not None else None,
        require_client_auth=tls.ca_certs is not None,
    )
    return server.add_secure_port(address, credentials)


def open_channel(address: str, options: Sequence[tuple[str, int]], tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel, to be closed by the caller. The files of ``tls`` are read now."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca_certs.read_bytes(),
        private_key=tls.keyfile.read_bytes() if tls.keyfile is not None else None,
        certificate_chain=tls.certfile.read_bytes() if tls.certfile is not None else None,
    )
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name is not None else []
    return grpc.aio.secure_channel(address, credentials, options=[*options, *named])
