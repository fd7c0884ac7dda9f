"""A peer's side of renewal: it asks for a new certificate for its key long before the old one runs out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature

from roost import messages as m
from roost.errors import CredentialsError, MalformedMessageError, RoostError
from roost.transport.credentials import Credentials, create_csr, parse_certificate, public_bytes, read_identity
from roost.transport.enrolment_wire import to_bytes
from roost.transport.interface import Transport
from roost.types import Peer

logger = logging.getLogger(__name__)

RENEWED_BEFORE_END = 1 / 3
"""The part of a certificate's time that is left when it is renewed: a machine may be switched off for months."""
CHECK_S = 3600.0
"""Seconds between two looks at the clock, and between two attempts."""
RENEWAL_DEADLINE_S = 20.0

Clock = Callable[[], float]
"""Seconds since the epoch."""


class RenewableTransport(Transport, Protocol):
    """A transport that can go on with new credentials."""

    def use_credentials(self, credentials: Credentials) -> None:
        """Show these to peers from the next connection on."""


def renewal_due(certificate_pem: bytes, now: float) -> bool:
    """Return whether so little of a certificate's time is left that it should be renewed. Raises CredentialsError."""
    certificate = parse_certificate(certificate_pem)
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return now > end - RENEWED_BEFORE_END * (end - begin)


async def renew(transport: RenewableTransport, coordinator: Peer, credentials: Credentials, directory: Path) -> Credentials:
    """Get a new certificate for the same key, keep it in `directory`, let `transport` use it, and return the new credentials.

    Raises CredentialsError for a certificate that is not this peer's or cannot be kept, and what Transport.call raises.
    """
    request = m.RenewCertificate(csr_pem=create_csr(credentials.key_pem, credentials.peer_id).decode())
    reply = (await transport.call(coordinator, request, deadline_s=RENEWAL_DEADLINE_S)).message
    if not isinstance(reply, m.CertificateReply):
        raise MalformedMessageError(f"the coordinator answered a renewal with {type(reply).__name__}")
    renewed = dataclasses.replace(credentials, certificate_pem=to_bytes(reply.certificate_pem))
    _check(renewed, credentials)
    renewed.save(directory)
    transport.use_credentials(renewed)
    logger.info("certificate_renewed peer=%s until=%s", renewed.peer_id, parse_certificate(renewed.certificate_pem).not_valid_after_utc)
    return renewed


@contextlib.asynccontextmanager
async def renewing(
    transport: RenewableTransport, coordinator: Peer, credentials: Credentials, directory: Path, *, clock: Clock = time.time
) -> AsyncIterator[None]:
    """Renew the certificate whenever that is due, as long as the context is open; a renewal that fails is tried again later."""
    task = asyncio.create_task(_keep_renewed(transport, coordinator, credentials, directory, clock), name="renew-certificate")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _keep_renewed(transport: RenewableTransport, coordinator: Peer, credentials: Credentials, directory: Path, clock: Clock) -> None:
    while True:
        if renewal_due(credentials.certificate_pem, clock()):
            try:
                credentials = await renew(transport, coordinator, credentials, directory)
            except RoostError as error:
                logger.warning("certificate_not_renewed peer=%s error=%s what=%r", credentials.peer_id, error.code, error.message)
        await asyncio.sleep(CHECK_S)


def _check(renewed: Credentials, before: Credentials) -> None:
    """Raise CredentialsError unless the new certificate is for the same peer and key, from the same authority, and lasts longer."""
    new, old = parse_certificate(renewed.certificate_pem), parse_certificate(before.certificate_pem)
    try:
        new.verify_directly_issued_by(parse_certificate(before.authority_pem))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CredentialsError("the coordinator sent a certificate that its authority did not issue") from error
    same = public_bytes(new.public_key()) == public_bytes(old.public_key()) and read_identity(renewed.certificate_pem) == (
        before.peer_id,
        before.role,
    )
    if not same or new.not_valid_after_utc < old.not_valid_after_utc:
        raise CredentialsError("the coordinator sent a certificate for another peer, or one that ends earlier")
