"""Who a peer is: its key, its certificate, and the authority that vouches for it.

A certificate names its holder twice: a URI ('roost://ROLE/PEER-ID') that says who it is, and a DNS name made from the peer id
alone that TLS checks when the peer is dialled. The private key never leaves the directory it was made in.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from roost.config import IDENTIFIER
from roost.errors import CredentialsError
from roost.types import Role

URI_SCHEME = "roost://"
DNS_SUFFIX = ".peer.roost.internal"
KEY_FILE = "key.pem"
CERTIFICATE_FILE = "certificate.pem"
AUTHORITY_FILE = "authority.pem"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a peer proves its identity with."""

    peer_id: str
    role: Role
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    authority_pem: bytes
    """The certificate of the authority whose peers it talks to."""

    def save(self, directory: Path) -> None:
        """Write key (mode 0600), certificate and authority into `directory`, each replaced as a whole."""
        write_private(directory / KEY_FILE, self.key_pem)
        write_private(directory / CERTIFICATE_FILE, self.certificate_pem)
        write_private(directory / AUTHORITY_FILE, self.authority_pem)

    @classmethod
    def load(cls, directory: Path, *, now: datetime.datetime | None = None) -> Credentials:
        """Return what `save` wrote. Raises CredentialsError if it is missing, damaged, does not fit together, or has run out."""
        key_pem, certificate_pem, authority_pem = (read_file(directory / name) for name in (KEY_FILE, CERTIFICATE_FILE, AUTHORITY_FILE))
        certificate, authority = parse_certificate(certificate_pem), parse_certificate(authority_pem)
        if public_bytes(certificate.public_key()) != public_bytes(load_key(key_pem).public_key()):
            raise CredentialsError(f"the key in {directory} is not the one of the certificate beside it")
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise CredentialsError(f"the certificate in {directory} was not issued by the authority beside it") from error
        if (now or datetime.datetime.now(datetime.UTC)) > certificate.not_valid_after_utc:
            raise CredentialsError(f"the certificate in {directory} ran out on {certificate.not_valid_after_utc:%Y-%m-%d}")
        peer_id, role = read_identity(certificate_pem)
        return cls(peer_id=peer_id, role=role, certificate_pem=certificate_pem, key_pem=key_pem, authority_pem=authority_pem)


def dns_name(peer_id: str) -> str:
    """Return the DNS name in the certificate of `peer_id`.

    It is a hash since TLS compares names without regard to case, treats dots specially, and limits a label to 63 characters,
    while peer ids may differ only in case, hold dots, and have 64 characters.
    """
    digest = hashlib.sha256(peer_id.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=").lower() + DNS_SUFFIX


def identity_uri(peer_id: str, role: Role) -> str:
    """Return the URI that says who the holder of a certificate is."""
    return f"{URI_SCHEME}{role}/{peer_id}"


def read_identity(certificate_pem: bytes) -> tuple[str, Role]:
    """Return the peer id and role a certificate names; whoever calls has verified it. Raises CredentialsError."""
    certificate = parse_certificate(certificate_pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError) as error:
        raise CredentialsError("a certificate names no peer") from error
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(URI_SCHEME)]
    role, _, peer_id = uris[0].removeprefix(URI_SCHEME).partition("/") if len(uris) == 1 else ("", "", "")
    if role not in set(Role) or not IDENTIFIER.fullmatch(peer_id):
        raise CredentialsError("a certificate names no peer, or more than one")
    return peer_id, Role(role)


def expires_at(certificate_pem: bytes) -> float:
    """Return when a certificate runs out, in seconds since the epoch. Raises CredentialsError."""
    return parse_certificate(certificate_pem).not_valid_after_utc.timestamp()


def key_hash(key: object) -> str:
    """Return the hex SHA-256 of a public key: it tells one holder of a name from another. Raises CredentialsError."""
    return hashlib.sha256(public_bytes(key)).hexdigest()


def fingerprint(certificate_pem: bytes) -> str:
    """Return 'sha256:' and the hex SHA-256 of the certificate's DER bytes. Raises CredentialsError."""
    return "sha256:" + parse_certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def create_key() -> bytes:
    """Return a new private key (EC P-256) as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def load_or_create_key(directory: Path) -> bytes:
    """Return the key kept in `directory`, making one (mode 0600) if there is none. Raises CredentialsError if it is damaged."""
    path = directory / KEY_FILE
    if not path.exists():
        write_private(path, create_key())
    key_pem = read_file(path)
    load_key(key_pem)
    return key_pem


def create_csr(key_pem: bytes, name: str) -> bytes:
    """Return a request for a certificate for this key, as PEM; it proves that its sender holds the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(load_key(key_pem), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Return a private key from PEM. Raises CredentialsError unless it is an EC P-256 key."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialsError("a private key is damaged") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CredentialsError("a private key is not an EC P-256 key")
    return key


def parse_certificate(certificate_pem: bytes) -> x509.Certificate:
    """Return a certificate from PEM. Raises CredentialsError."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise CredentialsError("a certificate is damaged") from error


def public_bytes(key: object) -> bytes:
    """Return the DER bytes of an EC public key. Raises CredentialsError for any other kind of key."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CredentialsError("a public key is not an EC key")
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_file(path: Path) -> bytes:
    """Return what is in a file of credentials. Raises CredentialsError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}") from error


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` as a whole by a file only its owner may read; makes the directory (mode 0700) if it is missing.

    Raises CredentialsError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be written: {error.strerror}", hint="Choose another directory for the state.") from error
