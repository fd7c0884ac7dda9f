from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from roost.errors import CredentialsError, MalformedMessageError
from roost.transport.authority import (
    AUTHORITY_CERTIFICATE_FILE,
    AUTHORITY_KEY_FILE,
    ENROLMENT_KEY_FILE,
    Authority,
    create_authority,
    csr_key_hash,
    open_authority,
    open_enrolment_identity,
)
from roost.transport.credentials import create_csr, create_key, dns_name, parse_certificate, read_identity
from roost.types import Role


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return create_authority(tmp_path)


def test_an_authority_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = open_authority(tmp_path)
    assert open_authority(tmp_path) == first
    with pytest.raises(CredentialsError, match="already has an authority"):
        create_authority(tmp_path)
    assert stat.S_IMODE((tmp_path / AUTHORITY_KEY_FILE).stat().st_mode) == 0o600


def test_an_enrolment_identity_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = open_enrolment_identity(tmp_path)
    assert open_enrolment_identity(tmp_path) == first
    assert stat.S_IMODE((tmp_path / ENROLMENT_KEY_FILE).stat().st_mode) == 0o600


def test_a_damaged_authority_is_an_error_and_not_made_anew(tmp_path: Path) -> None:
    open_authority(tmp_path)
    (tmp_path / AUTHORITY_CERTIFICATE_FILE).write_text("damaged")
    with pytest.raises(CredentialsError):
        open_authority(tmp_path)


def test_the_authority_decides_who_a_certificate_names(authority: Authority) -> None:
    csr = create_csr(create_key(), "coordinator")
    pem = authority.issue(csr, peer_id="node-1", role=Role.NODE)
    assert read_identity(pem) == ("node-1", Role.NODE)
    names = parse_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [dns_name("node-1")]
    assert b"coordinator" not in parse_certificate(pem).public_bytes(serialization.Encoding.DER)


def test_a_peers_certificate_serves_both_ends_and_signs_no_others(authority: Authority) -> None:
    certificate = parse_certificate(authority.create_credentials("node-1", Role.NODE).certificate_pem)
    extensions = certificate.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    certificate.verify_directly_issued_by(parse_certificate(authority.certificate_pem))


def test_a_request_that_its_key_did_not_sign_is_refused(authority: Authority) -> None:
    csr = x509.load_pem_x509_csr(create_csr(create_key(), "node-1")).public_bytes(serialization.Encoding.DER)
    damaged = csr[:-1] + bytes([csr[-1] ^ 1])
    pem = x509.load_der_x509_csr(damaged).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(MalformedMessageError, match="not signed"):
        authority.issue(pem, peer_id="node-1", role=Role.NODE)


@pytest.mark.parametrize("key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())])
def test_other_kinds_of_keys_are_refused(authority: Authority, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node-1")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    with pytest.raises(MalformedMessageError, match="P-256"):
        csr_key_hash(csr.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("csr", [b"", b"garbage", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"])
def test_garbage_is_no_request(csr: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        csr_key_hash(csr)
