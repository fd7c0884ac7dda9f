"""Names and options both sides of the gRPC transport share."""

from __future__ import annotations

import re
from collections.abc import Iterable

from roost.config import TransportConfig
from roost.transport.framing import MAX_FRAME_BYTES
from roost.transport.shaping import frame_bytes

SERVICE = "roost.Transport"
SEND_METHOD = f"/{SERVICE}/Send"
CALL_METHOD = f"/{SERVICE}/Call"

WHOLE_NUMBER = re.compile("[0-9]{1,9}")
GrpcOptions = list[tuple[str, int | str]]

FRAME_SLACK = 1024
MAX_STREAMS = 256
"""Streams and calls one connection may have open at a time; further ones wait at the caller."""
MAX_METADATA_BYTES = 32 << 10
FRAME_BYTES_KEY = "roost-frame-bytes"
"""What an endpoint with a limited downlink tells its peers: the largest frame it should be sent."""
LEAST_FRAME_BYTES = 1024
LOOKAHEAD_BYTES = 16 << 10
"""What a stream may bring beyond what is read, where the downlink is limited: one frame of HTTP/2."""


def frame_bytes_for(metadata: Iterable[tuple[str, str | bytes]] | None, own: int) -> int:
    """Return the size of frames to a peer that sent this metadata: our own, or what it asks for if that is less and possible."""
    for key, value in metadata or ():
        if key == FRAME_BYTES_KEY and isinstance(value, str) and WHOLE_NUMBER.fullmatch(value):
            return min(own, max(LEAST_FRAME_BYTES, int(value)))
    return own


def asked_frame_bytes(config: TransportConfig) -> tuple[tuple[str, str], ...]:
    """Return the metadata that asks peers for frames that fit this endpoint's downlink; empty without a limit."""
    if config.downlink_bytes_per_s == 0:
        return ()
    return ((FRAME_BYTES_KEY, str(frame_bytes(config, config.downlink_bytes_per_s))),)


def _common_options(config: TransportConfig) -> GrpcOptions:
    keepalive_ms = int(config.keepalive_s * 1000)
    # With a limited downlink, what peers may send ahead of what is read must not grow.
    window: GrpcOptions = (
        [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES)] if config.downlink_bytes_per_s > 0 else []
    )
    return [
        *window,
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
        # The one bound on connections without a certificate. grpc has a limit on their number, too, "max_allowed_incoming_connections",
        # but it counts all of them: whoever fills it shuts honest peers out.
        ("grpc.server_handshake_timeout_ms", int(config.connect_s * 1000)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Peers may be configured to ping more often than we do.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]
