"""Revoked peers are refused at once; certificates are renewed with the key that was enrolled. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from roost.coordinator.certificates import CertificateDesk, refuse_revoked
from roost.coordinator.enrolment import EnrolmentServer, issue_join_token
from roost.coordinator.store import Store
from roost.errors import CredentialsError, ForbiddenError, TokenRejectedError, TransportError
from roost.messages import Done, Message, OpenRound, Ping, RenewCertificate
from roost.transport.authority import Authority, EnrolmentIdentity, open_authority, open_enrolment_identity
from roost.transport.credentials import Credentials, create_csr, create_key, parse_certificate
from roost.transport.enrolment_client import Enrolment, enrol
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.interface import Buffer, Lane, ReceivedBuffer, Reply, Sender
from roost.transport.renewal import renew, renewal_due, renewing
from roost.types import Peer, Role

WAIT_S = 20.0
DAY_S = 86_400.0


@dataclass
class Answers:
    """Answers calls and counts messages."""

    messages: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_message(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> None:
        self.messages += 1
        self.arrived.set()

    async def on_call(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> tuple[Message, Sequence[Buffer]]:
        return Done(), ()


class Watched(GrpcTransport):
    """Says when it was given new credentials, and when a call failed."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self.renewed, self.failed = asyncio.Event(), asyncio.Event()

    def use_credentials(self, credentials: Credentials) -> None:
        super().use_credentials(credentials)
        self.renewed.set()

    async def call(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        try:
            return await super().call(peer, message, buffers, lane=lane, deadline_s=deadline_s)
        except TransportError:
            self.failed.set()
            raise


@dataclass
class Office:
    """A coordinator's two ports, without the coordinator."""

    directory: Path
    authority: Authority = field(init=False)
    identity: EnrolmentIdentity = field(init=False)
    store: Store = field(init=False)
    handler: Answers = field(default_factory=Answers)
    coordinator: GrpcTransport = field(init=False)
    server: EnrolmentServer = field(init=False)

    @property
    def database(self) -> Path:
        return self.directory / "coordinator" / "roost.db"

    @property
    def peer(self) -> Peer:
        return Peer(peer_id="coordinator", address=self.coordinator.address)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Office]:
        self.authority = open_authority(self.directory / "coordinator")
        self.identity = open_enrolment_identity(self.directory / "coordinator")
        with Store(self.database) as self.store:
            credentials = self.authority.create_credentials("coordinator", Role.COORDINATOR)
            self.coordinator = GrpcTransport(credentials, admit=partial(refuse_revoked, self.store))
            await self.coordinator.start(CertificateDesk(self.handler, store=self.store, authority=self.authority))
            self.server = EnrolmentServer(
                store=self.store, authority=self.authority, identity=self.identity, coordinator=self.peer, clock=time.time
            )
            await self.server.start()
            try:
                async with asyncio.timeout(WAIT_S):
                    yield self
            finally:
                await self.server.stop()
                await self.coordinator.stop()

    async def join(self, name: str, *, state: str = "", replaces: str | None = None) -> Enrolment:
        token = issue_join_token(self.store, self.identity, Role.NODE, now=time.time(), ttl_s=60, replaces=replaces)
        address = f"127.0.0.1:{self.server.port}"
        return await enrol(address, token, name=name, state_dir=self.directory / (state or name), deadline_s=WAIT_S)

    @contextlib.asynccontextmanager
    async def node(self, credentials: Credentials) -> AsyncIterator[Watched]:
        transport = Watched(credentials)
        await transport.start(Answers())
        try:
            yield transport
        finally:
            await transport.stop()


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(directory=tmp_path)


MESSAGE = OpenRound(job_id="job", segment=0, round=0)


def test_a_peer_that_another_process_revokes_is_refused_from_its_next_message_on(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment, other = await office.join("node-1"), await office.join("node-2")
            async with office.node(enrolment.credentials) as node, office.node(other.credentials) as neighbour:
                await node.call(office.peer, Ping())
                await node.send(office.peer, MESSAGE)
                await office.handler.arrived.wait()
                with Store(office.database) as another:
                    another.revoke("node-1", time.time())
                with pytest.raises(ForbiddenError, match="node-1 was revoked"):
                    await node.call(office.peer, Ping())
                with pytest.raises(ForbiddenError, match="node-1 was revoked"):
                    while True:
                        # The stream was open before: the network may take some messages more, the handler gets none.
                        await node.send(office.peer, MESSAGE)
                assert office.handler.messages == 1
                await neighbour.call(office.peer, Ping())

    asyncio.run(scene())


def test_a_revoked_key_does_not_come_back_under_any_name(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            await office.join("node-1")
            office.store.revoke("node-1", time.time())
            for name, replaces in (("node-1", None), ("node-9", None), ("node-1", "node-1")):
                with pytest.raises(ForbiddenError, match="was revoked"):
                    await office.join(name, state="node-1", replaces=replaces)

    asyncio.run(scene())


def test_a_revoked_name_goes_to_a_new_key_only_by_a_token_made_to_replace_it(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            old = await office.join("node-1")
            office.store.revoke("node-1", time.time())
            with pytest.raises(ForbiddenError, match="belongs to a peer with another key"):
                await office.join("node-1", state="anew")
            with pytest.raises(ForbiddenError, match="this token is for the name node-1"):
                await office.join("node-2", replaces="node-1")
            new = await office.join("node-1", state="anew", replaces="node-1")
            async with office.node(new.credentials) as node:
                await node.call(office.peer, Ping())
            async with office.node(old.credentials) as node:
                with pytest.raises(ForbiddenError, match="node-1 was revoked"):
                    await node.call(office.peer, Ping())
            peer = office.store.peer("node-1")
            assert peer is not None
            assert peer.revoked_at is None

    asyncio.run(scene())


def test_a_name_that_is_replaced_leaves_the_key_that_had_it_revoked(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            lost = await office.join("node-1")
            await office.join("node-1", state="anew", replaces="node-1")
            async with office.node(lost.credentials) as node:
                with pytest.raises(ForbiddenError, match="node-1 was revoked"):
                    await node.call(office.peer, Ping())

    asyncio.run(scene())


def test_a_certificate_is_renewed_without_a_token_and_kept(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment = await office.join("node-1")
            async with office.node(enrolment.credentials) as node:
                renewed = await renew(node, office.peer, enrolment.credentials, office.directory / "node-1")
                assert renewed.key_pem == enrolment.credentials.key_pem
                assert renewed.certificate_pem != enrolment.credentials.certificate_pem
                assert Credentials.load(office.directory / "node-1") == renewed
                certificate = parse_certificate(renewed.certificate_pem)
                peer = office.store.peer("node-1")
                assert peer is not None
                assert peer.serial == f"{certificate.serial_number:x}"
                assert peer.expires_at == certificate.not_valid_after_utc.timestamp()
                # Both ends of new connections go by the new certificate.
                await node.forget("coordinator")
                await node.call(office.peer, Ping())
                await office.coordinator.call(Peer(peer_id="node-1", address=node.address), Done())

    asyncio.run(scene())


def test_a_certificate_is_given_only_for_the_key_that_was_enrolled(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment = await office.join("node-1")
            async with office.node(enrolment.credentials) as node:
                request = RenewCertificate(csr_pem=create_csr(create_key(), "node-1").decode())
                with pytest.raises(ForbiddenError, match="node-1 asks for a certificate for a key that it did not join with"):
                    await node.call(office.peer, request)

    asyncio.run(scene())


def test_a_revoked_peer_gets_no_new_certificate(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment = await office.join("node-1")
            office.store.revoke("node-1", time.time())
            async with office.node(enrolment.credentials) as node:
                with pytest.raises(ForbiddenError, match="node-1 was revoked"):
                    await renew(node, office.peer, enrolment.credentials, office.directory / "node-1")

    asyncio.run(scene())


def test_an_agent_that_runs_for_long_renews_by_itself(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment = await office.join("node-1")
            directory = office.directory / "node-1"
            async with office.node(enrolment.credentials) as node:

                def late() -> float:
                    return time.time() + 300 * DAY_S

                async with renewing(node, office.peer, enrolment.credentials, directory, clock=late):
                    await node.renewed.wait()
                assert Credentials.load(directory) != enrolment.credentials

    asyncio.run(scene())


def test_a_renewal_is_due_in_the_last_third_of_a_certificates_time(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            pem = (await office.join("node-1")).credentials.certificate_pem
            assert not renewal_due(pem, time.time())
            assert not renewal_due(pem, time.time() + 240 * DAY_S)
            assert renewal_due(pem, time.time() + 250 * DAY_S)

    asyncio.run(scene())


def test_a_certificate_of_another_authority_is_not_taken(office: Office, tmp_path: Path) -> None:
    class Impostor(Answers):
        async def on_call(self, sender: Sender, message: Message, buffers: list[ReceivedBuffer]) -> tuple[Message, Sequence[Buffer]]:
            assert isinstance(message, RenewCertificate)
            return await desk.on_call(sender, message, buffers)

    async def scene() -> None:
        nonlocal desk
        async with office.open():
            enrolment = await office.join("node-1")
            desk = CertificateDesk(Answers(), store=office.store, authority=open_authority(tmp_path / "another"))
            false = GrpcTransport(office.authority.create_credentials("coordinator", Role.COORDINATOR))
            await false.start(Impostor())
            async with office.node(enrolment.credentials) as node:
                with pytest.raises(CredentialsError, match="its authority did not issue"):
                    await renew(node, Peer(peer_id="coordinator", address=false.address), enrolment.credentials, tmp_path / "node-1")
            await false.stop()
            assert Credentials.load(tmp_path / "node-1") == enrolment.credentials

    desk: CertificateDesk
    asyncio.run(scene())


def test_a_coordinator_that_cannot_be_reached_does_not_end_the_agent(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with office.open():
            enrolment = await office.join("node-1")
            async with office.node(enrolment.credentials) as node:
                nobody = Peer(peer_id="coordinator", address="127.0.0.1:1")
                with pytest.raises(TransportError):
                    await renew(node, nobody, enrolment.credentials, office.directory / "node-1")
                node.failed.clear()
                async with renewing(node, nobody, enrolment.credentials, office.directory / "node-1", clock=lambda: time.time() * 2):
                    await node.failed.wait()
                    await node.call(office.peer, Ping())
                assert "certificate_not_renewed peer=node-1" in caplog.text

    asyncio.run(scene())


def test_a_token_to_replace_a_name_works_once_like_any_other(office: Office) -> None:
    async def scene() -> None:
        async with office.open():
            await office.join("node-1")
            secret = office.store.issue_token(Role.NODE, now=0.0, ttl_s=60, replaces="node-1")
            redeem = partial(office.store.redeem_token, secret, peer_id="node-1", serial=1, now=1.0)
            assert redeem(key_hash="k2") is Role.NODE
            with pytest.raises(TokenRejectedError, match="used before"):
                redeem(key_hash="k3")

    asyncio.run(scene())
