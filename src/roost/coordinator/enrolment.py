"""The coordinator's public port: trades a join token for a certificate, over TLS that shows only the server's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509

from roost.config import IDENTIFIER
from roost.coordinator.store import Store
from roost.errors import ForbiddenError, InvalidConfigError, PeerUnreachableError, RoostError
from roost.transport.authority import Authority, EnrolmentIdentity, csr_key_hash
from roost.transport.credentials import fingerprint
from roost.transport.dispatch import failed_from
from roost.transport.enrolment_wire import EnrolmentAnswer, EnrolmentGrant, EnrolmentRequest, JoinToken, read_record, to_bytes, write_record
from roost.types import Peer, Role

logger = logging.getLogger(__name__)

EXCHANGE_S = 10.0
"""Deadline for one joiner, handshake apart."""
HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 256
"""Joiners served at a time; more are turned away."""
LINGER_S = 1.0
"""How long a closing connection waits for the joiner to close, too."""


def issue_join_token(store: Store, identity: EnrolmentIdentity, role: Role, *, now: float, ttl_s: float) -> str:
    """Return the text of a new token for one peer to join as `role`. Raises ForbiddenError for the coordinator's own role."""
    secret = store.issue_token(role, now, ttl_s)
    return JoinToken(secret=secret, fingerprint=fingerprint(identity.certificate_pem)).text


class EnrolmentServer:
    """Admits joiners. Each has a connection, a size limit and a deadline of its own, so a slow one holds up nobody."""

    def __init__(
        self,
        *,
        store: Store,
        authority: Authority,
        identity: EnrolmentIdentity,
        coordinator: Peer,
        clock: Callable[[], float],
        host: str = "127.0.0.1",
        port: int = 0,
        exchange_s: float = EXCHANGE_S,
    ) -> None:
        """`coordinator` is what joiners are told: its name and its mutual-TLS address. `clock` gives seconds since the epoch."""
        self._store = store
        self._authority = authority
        self._identity = identity
        self._coordinator = coordinator
        self._clock = clock
        self._host = host
        self._port = port
        self._exchange_s = exchange_s
        self._server: asyncio.Server | None = None
        self._joiners: set[asyncio.Task[Any]] = set()

    @property
    def port(self) -> int:
        """The port it listens on; known after `start`."""
        return self._port

    async def start(self) -> None:
        """Begin to listen. Raises InvalidConfigError if the port cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, ssl=_tls(self._identity), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:
            raise InvalidConfigError(f"the coordinator cannot listen on {self._host} port {self._port}: {error.strerror}") from error
        self._port = self._server.sockets[0].getsockname()[1]
        logger.info("enrolment_listening host=%s port=%d", self._host, self._port)

    async def stop(self) -> None:
        """Stop listening and end what is under way; may be called twice."""
        if self._server is None:
            return
        self._server.close()
        for task in self._joiners:
            task.cancel()
        await asyncio.gather(*self._joiners, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joiners.add(task)
        source = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(self._exchange_s):
                answer = await self._answer(reader, source)
                write_record(writer, answer)
                await writer.drain()
        except TimeoutError:
            logger.warning("enrolment_late source=%s", source)
        except (OSError, asyncio.IncompleteReadError) as error:
            logger.warning("enrolment_broken source=%s error=%r", source, str(error))
        finally:
            self._joiners.discard(task)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, source: object) -> EnrolmentAnswer:
        try:
            if len(self._joiners) > MAX_CONNECTIONS:
                raise PeerUnreachableError("too many peers join at the same time", hint="Try again in some seconds.")
            request = await read_record(reader, EnrolmentRequest)
            grant = self._admit(request)
        except RoostError as error:
            logger.warning("enrolment_refused source=%s error=%s what=%r", source, error.code, error.message)
            return EnrolmentAnswer(grant=None, failure=failed_from(error))
        logger.info("enrolled node=%s role=%s source=%s", grant.peer_id, grant.role, source)
        return EnrolmentAnswer(grant=grant, failure=None)

    def _admit(self, request: EnrolmentRequest) -> EnrolmentGrant:
        """Use up the token and issue the certificate; nothing here waits, so two joiners cannot use one token."""
        if IDENTIFIER.fullmatch(request.name) is None:
            raise InvalidConfigError(f"node name {request.name!r} must be 1 to 64 letters, digits, '_', '.' or '-'")
        if request.name == self._coordinator.peer_id:
            raise ForbiddenError(f"the name {request.name} is the coordinator's own", hint="Choose another name.")
        csr_pem = to_bytes(request.csr_pem)
        key_hash = csr_key_hash(csr_pem)
        serial = x509.random_serial_number()
        role = self._store.redeem_token(request.secret, peer_id=request.name, key_hash=key_hash, serial=serial, now=self._clock())
        certificate_pem = self._authority.issue(csr_pem, peer_id=request.name, role=role, serial=serial)
        return EnrolmentGrant(
            peer_id=request.name,
            role=role,
            certificate_pem=certificate_pem.decode(),
            authority_pem=self._authority.certificate_pem.decode(),
            coordinator=self._coordinator,
        )


def _tls(identity: EnrolmentIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module reads keys from files only; this one has mode 0600 and is gone at once.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "identity.pem"
        path.touch(mode=0o600)
        path.write_bytes(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(path)
    return context
