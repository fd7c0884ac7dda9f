"""Which of this machine's addresses a peer can reach it by."""

from __future__ import annotations

import socket

from roost.errors import InvalidConfigError, PeerUnreachableError


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of 'host:port'. Raises InvalidConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidConfigError(f"address {address!r} is not host:port, such as 192.168.1.5:7700")
    return host.strip("[]"), int(port)


def host_towards(address: str) -> str:
    """Return the address this machine has on its way to `address` (host:port); nothing is sent.

    Asking the routing table, instead of listing interfaces, cannot pick a bridge or a VPN that does not lead there.
    Raises PeerUnreachableError if there is no way.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerUnreachableError(f"there is no way to {address}: {error}") from error
