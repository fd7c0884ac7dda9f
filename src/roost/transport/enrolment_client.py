"""The joiner's side of enrolment: a token in, credentials out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from roost.codec import decode_record, encode_record
from roost.config import check_identifier
from roost.errors import (
    CredentialsError,
    DeadlineError,
    FingerprintError,
    InvalidConfigError,
    MalformedMessageError,
    PeerUnreachableError,
)
from roost.transport.addresses import split_address
from roost.transport.credentials import (
    Credentials,
    create_csr,
    load_key,
    load_or_create_key,
    parse_certificate,
    public_bytes,
    read_file,
    read_identity,
    write_private,
)
from roost.transport.dispatch import error_from
from roost.transport.enrolment_wire import (
    EnrolmentAnswer,
    EnrolmentGrant,
    EnrolmentRequest,
    JoinToken,
    parse_token,
    read_record,
    to_bytes,
    write_record,
)
from roost.types import Peer

COORDINATOR_FILE = "coordinator.json"
TOKEN_FILE = "token.sha256"
ANY_HOST = ("", "0.0.0.0", "[::]", "::")
CUT_SHORT_HINT = (
    "The token may be used up. Get a fresh one with 'roost token' and join again with the same name and state directory: "
    "the name stays yours because its key is kept there."
)


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What a joiner keeps: who it is, and where its coordinator is."""

    credentials: Credentials
    coordinator: Peer

    def save(self, directory: Path) -> None:
        """Write it into `directory`, for `load`."""
        self.credentials.save(directory)
        write_private(directory / COORDINATOR_FILE, json.dumps(encode_record(self.coordinator)).encode())

    @classmethod
    def load(cls, directory: Path) -> Enrolment:
        """Return what an earlier enrolment kept; no token is needed. Raises CredentialsError if it is missing or damaged."""
        credentials = Credentials.load(directory)
        try:
            coordinator: Peer = decode_record(Peer, json.loads(read_file(directory / COORDINATOR_FILE)))
        except (ValueError, RecursionError, MalformedMessageError) as error:
            raise CredentialsError(f"{directory / COORDINATOR_FILE} is damaged") from error
        return cls(credentials=credentials, coordinator=coordinator)


async def enrol(address: str, token: str, *, name: str, state_dir: Path, deadline_s: float) -> Enrolment:
    """Join with a token; returns the enrolment, which is also kept in `state_dir`.

    The key is made in `state_dir` (or found there) and never leaves it. The token is shown only to the holder of the
    certificate it names.

    Raises TokenRejectedError, TokenExpiredError, FingerprintError, ForbiddenError (the name is taken), VersionMismatchError,
    PeerUnreachableError, DeadlineError, CredentialsError (the state directory cannot be used), InvalidConfigError (the name).
    """
    check_identifier(name, "node name")
    joining = parse_token(token)
    host, port = _split(address)
    key_pem = load_or_create_key(state_dir)
    request = EnrolmentRequest(secret=joining.secret, name=name, csr_pem=create_csr(key_pem, name).decode())
    try:
        async with asyncio.timeout(deadline_s):
            answer = await _ask(host, port, joining, request)
    except TimeoutError as error:
        raise DeadlineError(f"the coordinator at {address} did not answer in {deadline_s:g} s") from error
    except asyncio.IncompleteReadError as error:
        raise PeerUnreachableError(f"the coordinator at {address} ended the connection without an answer", hint=CUT_SHORT_HINT) from error
    except ssl.SSLError as error:
        raise PeerUnreachableError(f"what answers at {address} is not a coordinator's enrolment port: {error.reason}") from error
    except OSError as error:
        raise PeerUnreachableError(f"the coordinator at {address} cannot be reached: {error}") from error
    if answer.failure is not None:
        raise error_from(answer.failure)
    if answer.grant is None:
        raise MalformedMessageError(f"the coordinator at {address} sent an empty answer")
    enrolment = _accept(answer.grant, key_pem, host)
    enrolment.save(state_dir)
    return enrolment


async def enrol_once(address: str, token: str, *, name: str, state_dir: Path, deadline_s: float) -> Enrolment:
    """Do what `enrol` does, unless `state_dir` has enrolled with this very token before: then return what was kept.

    So a command line with a token in it can be run again. Raises what `enrol` and `Enrolment.load` do.
    """
    used = state_dir / TOKEN_FILE
    digest = hashlib.sha256(token.encode(errors="replace")).hexdigest().encode()
    if used.exists() and hmac.compare_digest(read_file(used), digest):
        return Enrolment.load(state_dir)
    enrolment = await enrol(address, token, name=name, state_dir=state_dir, deadline_s=deadline_s)
    write_private(used, digest)
    return enrolment


async def _ask(host: str, port: int, token: JoinToken, request: EnrolmentRequest) -> EnrolmentAnswer:
    # No authority is known yet: the fingerprint, checked below, takes the place of the chain.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        _check_fingerprint(writer, token, f"{host}:{port}")
        write_record(writer, request)
        await writer.drain()
        return await read_record(reader, EnrolmentAnswer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _check_fingerprint(writer: asyncio.StreamWriter, token: JoinToken, address: str) -> None:
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    found = "sha256:" + hashlib.sha256(shown).hexdigest()
    if not hmac.compare_digest(found, token.fingerprint):
        raise FingerprintError(f"{address} shows a certificate with fingerprint {found}, the token names {token.fingerprint}")


def _accept(grant: EnrolmentGrant, key_pem: bytes, host: str) -> Enrolment:
    certificate_pem, authority_pem = to_bytes(grant.certificate_pem), to_bytes(grant.authority_pem)
    certificate: x509.Certificate = parse_certificate(certificate_pem)
    try:
        certificate.verify_directly_issued_by(parse_certificate(authority_pem))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CredentialsError("the coordinator sent a certificate that its own authority did not issue") from error
    if public_bytes(certificate.public_key()) != public_bytes(load_key(key_pem).public_key()):
        raise CredentialsError("the coordinator sent a certificate for another key")
    if read_identity(certificate_pem) != (grant.peer_id, grant.role):
        raise CredentialsError("the coordinator sent a certificate for another peer")
    credentials = Credentials(
        peer_id=grant.peer_id, role=grant.role, certificate_pem=certificate_pem, key_pem=key_pem, authority_pem=authority_pem
    )
    return Enrolment(credentials=credentials, coordinator=_reachable(grant.coordinator, host))


def _reachable(coordinator: Peer, host: str) -> Peer:
    """A coordinator that listens everywhere cannot name its address: it is where we reached it."""
    named, _, port = coordinator.address.rpartition(":")
    if named not in ANY_HOST:
        return coordinator
    return Peer(peer_id=coordinator.peer_id, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _split(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except InvalidConfigError as error:
        raise PeerUnreachableError(f"{address!r} is not the address of a coordinator", hint="Give it as HOST:PORT.") from error
