"""The coordinator's public port: trades a join token for a certificate, over TLS that shows only the server's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from roost.config import IDENTIFIER
from roost.coordinator.store import Store
from roost.errors import ForbiddenError, InvalidConfigError, RoostError
from roost.transport.authority import Authority, EnrolmentIdentity, csr_key_hash
from roost.transport.credentials import expires_at, fingerprint
from roost.transport.dispatch import failed_from
from roost.transport.enrolment_wire import EnrolmentAnswer, EnrolmentGrant, EnrolmentRequest, JoinToken, read_record, to_bytes, write_record
from roost.transport.guard import LOG_BURST, LOGGED_PER_S, RateLimit
from roost.types import Peer, Role

logger = logging.getLogger(__name__)

EXCHANGE_S = 10.0
"""Deadline for one joiner, handshake apart."""
HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 256
"""Joiners served at a time, those in the middle of their TLS handshake included; more are turned away."""
MAX_FROM_ONE_HOST = 64
"""Of those, the most from one address."""
BACKLOG = 128
FULL_S = 0.5
"""How long it waits before it accepts again when the process has no file left to open."""
LINGER_S = 1.0
"""How long a closing connection waits for the joiner to close, too."""


def issue_join_token(
    store: Store, identity: EnrolmentIdentity, role: Role, *, now: float, ttl_s: float, replaces: str | None = None
) -> str:
    """Return the text of a new token for one peer to join as `role`. Raises ForbiddenError for the coordinator's own role.

    With `replaces` it is for that name alone, which may have a new key then.
    """
    secret = store.issue_token(role, now, ttl_s, replaces=replaces)
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
        self._logged = RateLimit(LOGGED_PER_S, LOG_BURST)
        self._accepting: list[asyncio.Task[None]] = []
        self._joiners: dict[asyncio.Task[None], str] = {}
        """With the address that each comes from."""

    @property
    def port(self) -> int:
        """The port it listens on; known after `start`."""
        return self._port

    async def start(self) -> None:
        """Begin to listen. Raises InvalidConfigError if the port cannot be had."""
        context = _tls(self._identity)
        try:
            listening = _listen(self._host, self._port)
        except OSError as error:
            raise InvalidConfigError(f"the coordinator cannot listen on {self._host} port {self._port}: {error.strerror}") from error
        self._port = listening[0].getsockname()[1]
        self._accepting = [asyncio.create_task(self._accept(one, context), name="accept-joiners") for one in listening]
        logger.info("enrolment_listening host=%s port=%d", self._host, self._port)

    async def stop(self) -> None:
        """Stop listening and end what is under way; may be called twice."""
        ending = [*self._accepting, *self._joiners]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._accepting = []

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        """Take connections. One over the limits is closed before any work is done for it."""
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, source = await loop.sock_accept(listening)
                except OSError as error:
                    logger.warning("enrolment_not_accepted error=%s", error.strerror)
                    await asyncio.sleep(FULL_S)
                    continue
                host = str(source[0])
                if len(self._joiners) >= MAX_CONNECTIONS or list(self._joiners.values()).count(host) >= MAX_FROM_ONE_HOST:
                    connection.close()
                    continue
                task = loop.create_task(self._welcome(connection, context))
                self._joiners[task] = host
                task.add_done_callback(self._joiners.pop)

    async def _welcome(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError as error:
            logger.info("enrolment_handshake_failed error=%r", str(error))
            return
        await self._serve(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(self._exchange_s):
                answer = await self._answer(reader, source)
                write_record(writer, answer)
                await writer.drain()
        except TimeoutError:
            self._log("enrolment_late source=%s", source)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._log("enrolment_broken source=%s error=%r", source, str(error))
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await writer.wait_closed()

    def _log(self, event: str, *values: object) -> None:
        """Log what went wrong with a joiner; anybody can cause that, so only so often."""
        if self._logged.has_one(time.monotonic()):
            logger.warning(event, *values)

    async def _answer(self, reader: asyncio.StreamReader, source: object) -> EnrolmentAnswer:
        try:
            request = await read_record(reader, EnrolmentRequest)
            grant = self._admit(request)
        except RoostError as error:
            self._log("enrolment_refused source=%s error=%s what=%r", source, error.code, error.message)
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
        self._store.set_certificate(request.name, serial, expires_at(certificate_pem))
        return EnrolmentGrant(
            peer_id=request.name,
            role=role,
            certificate_pem=certificate_pem.decode(),
            authority_pem=self._authority.certificate_pem.decode(),
            coordinator=self._coordinator,
        )


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for every address that `host` stands for. Raises OSError."""
    listening: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            if os.name == "posix":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setblocking(False)
            one.bind(address)
            one.listen(BACKLOG)
    except OSError:
        for one in listening:
            one.close()
        raise
    return listening


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
