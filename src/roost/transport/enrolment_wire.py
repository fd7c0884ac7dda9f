"""What joiner and coordinator say to each other before the joiner has a certificate: one request, one answer, over TLS.

A frame is a magic word, the protocol version, a length, and that many bytes of JSON, which is decoded by the declared types.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roost.codec import decode_record, encode_record
from roost.errors import MalformedMessageError, MessageTooLargeError, TokenRejectedError, VersionMismatchError
from roost.messages import PROTOCOL_VERSION, Failed
from roost.types import Peer, Role

MAGIC = b"RoEn"
HEADER = struct.Struct("!4sHI")
MAX_ENROLMENT_BYTES = 64 << 10
TOKEN_PREFIX = "roost1"
TOKEN = re.compile(r"^roost1-([0-9a-f]{32,128})-([0-9a-f]{64})$")

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class JoinToken:
    """What a token says: a secret that works once, and the fingerprint of the certificate to show it to."""

    secret: str = field(repr=False)
    fingerprint: str
    """'sha256:' and 64 hex digits."""

    @property
    def text(self) -> str:
        return f"{TOKEN_PREFIX}-{self.secret}-{self.fingerprint.removeprefix('sha256:')}"


def parse_token(text: str) -> JoinToken:
    """Return the parts of a token. Raises TokenRejectedError if it is not one."""
    match = TOKEN.fullmatch(text.strip())
    if match is None:
        raise TokenRejectedError("this is not a join token: it should be roost1-SECRET-FINGERPRINT, copied as a whole")
    return JoinToken(secret=match[1], fingerprint=f"sha256:{match[2]}")


@dataclass(frozen=True, kw_only=True)
class EnrolmentRequest:
    """The joiner shows its token and asks for a certificate for its key."""

    secret: str = field(repr=False)
    name: str
    csr_pem: str


@dataclass(frozen=True, kw_only=True)
class EnrolmentGrant:
    """The joiner's certificate, and the coordinator as it is reached from now on."""

    peer_id: str
    role: Role
    certificate_pem: str
    authority_pem: str
    coordinator: Peer


@dataclass(frozen=True, kw_only=True)
class EnrolmentAnswer:
    """Exactly one of both."""

    grant: EnrolmentGrant | None
    failure: Failed | None


def to_bytes(text: str) -> bytes:
    """Return text from the wire as bytes; JSON may hold lone surrogates, which become question marks."""
    return text.encode(errors="replace")


def write_record(writer: asyncio.StreamWriter, record: Any) -> None:
    """Put one frame with `record` into the writer's buffer."""
    data = json.dumps(encode_record(record), separators=(",", ":"), allow_nan=False).encode()
    writer.write(HEADER.pack(MAGIC, PROTOCOL_VERSION, len(data)) + data)


async def read_record(reader: asyncio.StreamReader, kind: type[Record]) -> Record:
    """Read one frame and return the record in it; the caller sets the deadline.

    Raises MalformedMessageError, MessageTooLargeError, VersionMismatchError, or asyncio.IncompleteReadError.
    """
    magic, version, length = HEADER.unpack(await reader.readexactly(HEADER.size))
    if magic != MAGIC:
        raise MalformedMessageError("the other side does not speak the enrolment protocol")
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(f"the other side speaks protocol version {version}, this one {PROTOCOL_VERSION}")
    if length > MAX_ENROLMENT_BYTES:
        raise MessageTooLargeError(f"an enrolment message of {length} bytes, at most {MAX_ENROLMENT_BYTES} are allowed")
    try:
        raw = json.loads(await reader.readexactly(length))
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("an enrolment message is not JSON") from error
    record: Record = decode_record(kind, raw)
    return record
