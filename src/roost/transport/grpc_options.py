"""Names and options both sides of the gRPC transport share."""

from __future__ import annotations

from roost.config import TransportConfig
from roost.transport.framing import MAX_FRAME_BYTES

SERVICE = "roost.Transport"
SEND_METHOD = f"/{SERVICE}/Send"
CALL_METHOD = f"/{SERVICE}/Call"

GrpcOptions = list[tuple[str, int | str]]

FRAME_SLACK = 1024
MAX_STREAMS = 1024
"""Streams and calls one connection may have open at a time."""
MAX_METADATA_BYTES = 32 << 10


def _common_options(config: TransportConfig) -> GrpcOptions:
    keepalive_ms = int(config.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES + FRAME_SLACK),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES + FRAME_SLACK),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # In grpc 1.85 only this one ends a connection whose peer answers no ping; unset, that takes a minute.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(config: TransportConfig) -> GrpcOptions:
    """Return the options of a dialling connection."""
    connect_ms = int(config.connect_s * 1000)
    return [
        *_common_options(config),
        # This also bounds one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", connect_ms),
        ("grpc.use_local_subchannel_pool", 1),
        # Peers are on the user's own network; a proxy meant for the web must not see them.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def server_options(config: TransportConfig) -> GrpcOptions:
    """Return the options of a listening endpoint."""
    return [
        *_common_options(config),
        # Two processes must not share a port unnoticed.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(config.connect_s * 1000)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Peers may be configured to ping more often than we do.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]
