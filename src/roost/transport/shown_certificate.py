"""The certificate a listening endpoint shows, and how it is replaced while connections come in."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from roost.transport.credentials import Credentials

QUIET_S = 1.0
"""Seconds without a new connection after which the certificate may be replaced. A handshake's start takes less than a millisecond."""


class ShownCertificate:
    """Gives grpc a new certificate only when there is one, and only while no connection is being accepted.

    grpc asks at the start of every handshake, one at a time, and frees what it used before as soon as it is given something new,
    even while a handshake that asked before is about to use it (https://github.com/grpc/grpc/issues/36693; so in grpc 1.85).
    That corrupts the memory of the process, and a few connections at a time are enough, with a certificate or without.
    """

    def __init__(self, credentials: Credentials, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._credentials = credentials
        self._shown = credentials
        self._clock = clock
        self._asked_at = float("-inf")

    def replace(self, credentials: Credentials) -> None:
        """Show these from the first connection on that comes `QUIET_S` after the one before it."""
        self._credentials = credentials

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that wants a certificate of the same authority from whoever connects."""
        self._shown = self._credentials
        return grpc.dynamic_ssl_server_credentials(_configuration(self._shown), self.replacement, require_client_authentication=True)

    def replacement(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what to show from now on, or nothing to go on as before; called in grpc's threads, never in two at once."""
        now, before = self._clock(), self._asked_at
        self._asked_at = now
        if self._credentials is self._shown or now - before < QUIET_S:
            return None
        self._shown = self._credentials
        return _configuration(self._shown)


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    pair = (credentials.key_pem, credentials.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=credentials.authority_pem)
