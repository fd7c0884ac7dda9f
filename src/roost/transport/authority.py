"""The coordinator's certificate authority, and the certificate its enrolment port shows. Keys are EC P-256."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from roost.errors import CredentialsError, MalformedMessageError
from roost.transport.credentials import (
    Credentials,
    create_csr,
    create_key,
    dns_name,
    identity_uri,
    key_hash,
    load_key,
    parse_certificate,
    public_bytes,
    read_file,
    write_private,
)
from roost.types import Role

AUTHORITY_DAYS = 3650
PEER_DAYS = 365
CLOCK_SKEW = datetime.timedelta(days=1)
"""Certificates begin this long before they are made: the clocks of people's PCs differ."""
AUTHORITY_KEY_FILE = "authority-key.pem"
AUTHORITY_CERTIFICATE_FILE = "authority.pem"
ENROLMENT_KEY_FILE = "enrolment-key.pem"
ENROLMENT_CERTIFICATE_FILE = "enrolment.pem"


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Issues the certificates of all peers of one coordinator."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    def issue(self, csr_pem: bytes, *, peer_id: str, role: Role, serial: int | None = None) -> bytes:
        """Return a certificate (PEM) for the key in `csr_pem`; who it names is decided here, whatever the request says.

        Raises MalformedMessageError if the request is damaged, or its key is not EC P-256, or not held by its sender.
        """
        key = _csr_key(csr_pem)
        issuer = parse_certificate(self.certificate_pem)
        issuer_key = load_key(self.key_pem)
        names: list[x509.GeneralName] = [x509.DNSName(dns_name(peer_id)), x509.UniformResourceIdentifier(identity_uri(peer_id, role))]
        builder = (
            _builder(peer_id, key, PEER_DAYS, serial)
            .issuer_name(issuer.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            # Peers dial each other, so every one of them is both client and server.
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def create_credentials(self, peer_id: str, role: Role) -> Credentials:
        """Return credentials with a new key: for the coordinator itself, which needs no token."""
        key_pem = create_key()
        certificate_pem = self.issue(create_csr(key_pem, peer_id), peer_id=peer_id, role=role)
        return Credentials(peer_id=peer_id, role=role, certificate_pem=certificate_pem, key_pem=key_pem, authority_pem=self.certificate_pem)


@dataclass(frozen=True, kw_only=True)
class EnrolmentIdentity:
    """The self-signed certificate of the enrolment port; tokens carry its fingerprint."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def create_authority(directory: Path) -> Authority:
    """Make an authority, keep it in `directory` (key with mode 0600) and return it. Raises CredentialsError if one is there."""
    if (directory / AUTHORITY_KEY_FILE).exists():
        raise CredentialsError(f"{directory} already has an authority", hint="Use it, or give the new one a directory of its own.")
    key_pem = create_key()
    certificate_pem = _self_signed(key_pem, "roost authority", is_authority=True)
    write_private(directory / AUTHORITY_CERTIFICATE_FILE, certificate_pem)
    write_private(directory / AUTHORITY_KEY_FILE, key_pem)
    return Authority(certificate_pem=certificate_pem, key_pem=key_pem)


def open_authority(directory: Path) -> Authority:
    """Return the authority kept in `directory`, made first if there is none. Raises CredentialsError if it is damaged."""
    if not (directory / AUTHORITY_KEY_FILE).exists():
        return create_authority(directory)
    certificate_pem, key_pem = _load_pair(directory, AUTHORITY_CERTIFICATE_FILE, AUTHORITY_KEY_FILE)
    return Authority(certificate_pem=certificate_pem, key_pem=key_pem)


def open_enrolment_identity(directory: Path) -> EnrolmentIdentity:
    """Return the enrolment certificate kept in `directory`, made first if there is none. Raises CredentialsError if damaged."""
    if not (directory / ENROLMENT_KEY_FILE).exists():
        key_pem = create_key()
        write_private(directory / ENROLMENT_CERTIFICATE_FILE, _self_signed(key_pem, "roost enrolment", is_authority=False))
        write_private(directory / ENROLMENT_KEY_FILE, key_pem)
    certificate_pem, key_pem = _load_pair(directory, ENROLMENT_CERTIFICATE_FILE, ENROLMENT_KEY_FILE)
    return EnrolmentIdentity(certificate_pem=certificate_pem, key_pem=key_pem)


def csr_key_hash(csr_pem: bytes) -> str:
    """Return the hex SHA-256 of the public key in a request: it tells one holder of a name from another.

    Raises MalformedMessageError.
    """
    return key_hash(_csr_key(csr_pem))


def _load_pair(directory: Path, certificate_file: str, key_file: str) -> tuple[bytes, bytes]:
    certificate_pem, key_pem = read_file(directory / certificate_file), read_file(directory / key_file)
    if public_bytes(parse_certificate(certificate_pem).public_key()) != public_bytes(load_key(key_pem).public_key()):
        raise CredentialsError(f"{key_file} and {certificate_file} in {directory} do not belong together")
    return certificate_pem, key_pem


def _csr_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        proven = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise MalformedMessageError("a certificate request is damaged") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise MalformedMessageError("a certificate request is not for an EC P-256 key")
    if not proven:
        raise MalformedMessageError("a certificate request is not signed by the key it is for")
    return key


def _builder(name: str, key: ec.EllipticCurvePublicKey, days: int, serial: int | None = None) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key)
        .serial_number(serial if serial is not None else x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _self_signed(key_pem: bytes, name: str, *, is_authority: bool) -> bytes:
    key = load_key(key_pem)
    builder = (
        _builder(name, key.public_key(), AUTHORITY_DAYS)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(_key_usage(signs_certificates=is_authority), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
