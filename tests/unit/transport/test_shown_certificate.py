"""A certificate is replaced only between connections: doing so during one corrupts grpc's memory. Over real sockets where it says so."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import pytest
from transport_kit import GrpcFleet, Recorder, peer_of, stopping

from hand_clock import HandClock
from roost.messages import Ping
from roost.transport import shown_certificate
from roost.transport.authority import Authority, create_authority
from roost.transport.credentials import Credentials
from roost.transport.shown_certificate import QUIET_S, ShownCertificate
from roost.types import Role


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return create_authority(tmp_path / "authority")


def _credentials(authority: Authority) -> Credentials:
    return authority.create_credentials("one", Role.NODE)


def test_a_certificate_that_has_not_changed_is_never_given_again(authority: Authority) -> None:
    clock = HandClock()
    shown = ShownCertificate(_credentials(authority), clock)
    shown.server_credentials()
    for pause_s in (0.0, 0.1, 10 * QUIET_S, 1e6):
        clock.now += pause_s
        assert shown.replacement() is None


def test_a_new_certificate_waits_until_no_connection_has_come_for_a_while_and_is_given_once(authority: Authority) -> None:
    clock = HandClock()
    shown = ShownCertificate(_credentials(authority), clock)
    shown.server_credentials()
    assert shown.replacement() is None
    shown.replace(_credentials(authority))
    for _ in range(100):
        clock.now += 0.9 * QUIET_S
        assert shown.replacement() is None
    clock.now += QUIET_S
    assert isinstance(shown.replacement(), grpc.ServerCertificateConfiguration)
    clock.now += 10 * QUIET_S
    assert shown.replacement() is None


def test_a_certificate_from_before_the_start_is_not_replaced_by_itself(authority: Authority) -> None:
    shown = ShownCertificate(_credentials(authority), HandClock())
    shown.replace(_credentials(authority))
    shown.server_credentials()
    assert shown.replacement() is None


def test_who_connects_after_a_renewal_sees_the_new_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_certificate, "QUIET_S", 0.0)
    fleet = GrpcFleet(tmp_path)

    async def scene() -> None:
        async with stopping(fleet):
            one, two = fleet.make("one"), fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder())
            host, _, port = one.address.rpartition(":")
            before = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
            renewed = _credentials(fleet.authority)
            one.use_credentials(renewed)
            after = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
            assert after != before
            assert ssl.PEM_cert_to_DER_cert(after) == ssl.PEM_cert_to_DER_cert(renewed.certificate_pem.decode())
            await two.call(peer_of(one), Ping())

    asyncio.run(scene())
