"""Who may talk to the coordinator, and new certificates for those who do before their old ones run out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cryptography import x509

from roost import messages as m
from roost.coordinator.store import Store
from roost.errors import ForbiddenError
from roost.transport.authority import Authority, csr_key_hash
from roost.transport.credentials import expires_at
from roost.transport.enrolment_wire import to_bytes
from roost.transport.interface import Buffer, Handler, ReceivedBuffer, Sender

logger = logging.getLogger(__name__)


def refuse_revoked(store: Store, sender: Sender, key_hash: str) -> None:
    """Raise ForbiddenError if the key that `sender` proved to hold was revoked. For every message of the coordinator's port."""
    if store.is_revoked(key_hash):
        raise ForbiddenError(f"{sender.peer_id} was revoked", hint="Ask whoever runs the coordinator for a new token ('roost token').")


class CertificateDesk:
    """The coordinator's handler for RenewCertificate; hands everything else on to the one behind it."""

    def __init__(self, behind: Handler, *, store: Store, authority: Authority) -> None:
        self._behind = behind
        self._store = store
        self._authority = authority

    async def on_message(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> None:
        """Hand it on."""
        await self._behind.on_message(sender, message, buffers)

    async def on_call(self, sender: Sender, message: m.Message, buffers: list[ReceivedBuffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Answer RenewCertificate, and hand everything else on. Raises ForbiddenError for a key that the peer did not enrol with."""
        if isinstance(message, m.RenewCertificate):
            return self._renew(sender, message), ()
        return await self._behind.on_call(sender, message, buffers)

    def _renew(self, sender: Sender, message: m.RenewCertificate) -> m.CertificateReply:
        csr_pem = to_bytes(message.csr_pem)
        peer = self._store.peer(sender.peer_id)
        # The request is signed by its key, and the connection by the key of the certificate so far: both must be the enrolled one.
        if peer is None or peer.role is not sender.role or peer.key_hash != csr_key_hash(csr_pem):
            raise ForbiddenError(f"{sender.peer_id} asks for a certificate for a key that it did not join with")
        serial = x509.random_serial_number()
        certificate_pem = self._authority.issue(csr_pem, peer_id=sender.peer_id, role=sender.role, serial=serial)
        self._store.set_certificate(sender.peer_id, serial, expires_at(certificate_pem))
        logger.info("certificate_renewed peer=%s role=%s", sender.peer_id, sender.role)
        return m.CertificateReply(certificate_pem=certificate_pem.decode())
