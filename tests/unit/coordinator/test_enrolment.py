"""Enrolment over real sockets: the coordinator's port and the joiner's side of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from roost.coordinator.enrolment import MAX_FROM_ONE_HOST, EnrolmentServer, issue_join_token
from roost.coordinator.store import Store
from roost.errors import (
    CredentialsError,
    DeadlineError,
    FingerprintError,
    ForbiddenError,
    InvalidConfigError,
    PeerUnreachableError,
    RoostError,
    TokenExpiredError,
    TokenRejectedError,
    VersionMismatchError,
)
from roost.messages import Done
from roost.transport.authority import Authority, EnrolmentIdentity, open_authority, open_enrolment_identity
from roost.transport.credentials import KEY_FILE
from roost.transport.enrolment_client import COORDINATOR_FILE, Enrolment, enrol, enrol_once
from roost.transport.enrolment_wire import HEADER, MAGIC, MAX_ENROLMENT_BYTES, parse_token
from roost.transport.grpc_transport import GrpcTransport
from roost.types import Peer, Role

WAIT_S = 20.0


@dataclass
class Desk:
    """A coordinator's enrolment with everything it needs, and a clock a test sets."""

    directory: Path
    now: float = 1000.0
    server: EnrolmentServer = field(init=False)
    store: Store = field(init=False)
    authority: Authority = field(init=False)
    identity: EnrolmentIdentity = field(init=False)

    @contextlib.asynccontextmanager
    async def open(self, *, exchange_s: float = 10.0, reached: str = "127.0.0.1:7701") -> AsyncIterator[Desk]:
        self.authority = open_authority(self.directory / "coordinator")
        self.identity = open_enrolment_identity(self.directory / "coordinator")
        self.store = Store(self.directory / "coordinator" / "roost.db")
        self.server = EnrolmentServer(
            store=self.store,
            authority=self.authority,
            identity=self.identity,
            coordinator=Peer(peer_id="coordinator", address=reached),
            clock=lambda: self.now,
            exchange_s=exchange_s,
        )
        with self.store:
            await self.server.start()
            try:
                yield self
            finally:
                await self.server.stop()
                await self.server.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def token(self, role: Role = Role.NODE) -> str:
        return issue_join_token(self.store, self.identity, role, now=self.now, ttl_s=60)

    async def join(self, name: str, token: str | None = None, *, state: str = "", deadline_s: float = WAIT_S) -> Enrolment:
        directory = self.directory / (state or name)
        return await enrol(self.address, token or self.token(), name=name, state_dir=directory, deadline_s=deadline_s)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(directory=tmp_path)


def test_a_token_gives_credentials_that_are_kept(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            enrolment = await desk.join("node-1")
            assert (enrolment.credentials.peer_id, enrolment.credentials.role) == ("node-1", Role.NODE)
            assert enrolment.coordinator == Peer(peer_id="coordinator", address="127.0.0.1:7701")
            assert enrolment.credentials.authority_pem == desk.authority.certificate_pem
            assert Enrolment.load(desk.directory / "node-1") == enrolment
            assert stat.S_IMODE((desk.directory / "node-1" / KEY_FILE).stat().st_mode) == 0o600
            peer = desk.store.peer("node-1")
            assert peer is not None
            assert peer.role is Role.NODE

    asyncio.run(scene())


def test_an_enrolled_node_talks_to_the_coordinator(desk: Desk) -> None:
    class Answers:
        async def on_message(self, sender: object, message: object, buffers: object) -> None: ...

        async def on_call(self, sender: object, message: object, buffers: object) -> tuple[Done, tuple[()]]:
            return Done(), ()

    async def scene() -> None:
        authority = open_authority(desk.directory / "coordinator")
        coordinator = GrpcTransport(authority.create_credentials("coordinator", Role.COORDINATOR))
        await coordinator.start(Answers())
        async with desk.open(reached=coordinator.address):
            enrolment = await desk.join("node-1")
            node = GrpcTransport(enrolment.credentials)
            await node.start(Answers())
            assert (await node.call(enrolment.coordinator, Done())).message == Done()
            await node.stop()
        await coordinator.stop()

    asyncio.run(scene())


def test_the_token_and_not_the_joiner_decides_the_role(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            assert (await desk.join("ann", desk.token(Role.REQUESTER))).credentials.role is Role.REQUESTER

    asyncio.run(scene())


def test_a_coordinator_that_listens_everywhere_is_found_where_it_was_reached(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open(reached="0.0.0.0:7701"):
            assert (await desk.join("node-1")).coordinator.address == "127.0.0.1:7701"

    asyncio.run(scene())


def test_of_two_joiners_with_one_token_exactly_one_wins(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            token = desk.token()
            results = await asyncio.gather(*(desk.join(f"node-{n}", token) for n in range(4)), return_exceptions=True)
            assert sum(isinstance(result, Enrolment) for result in results) == 1
            assert sum(isinstance(result, TokenRejectedError) for result in results) == 3
            assert len(desk.store.peers()) == 1

    asyncio.run(scene())


def test_an_expired_token_is_named_as_such(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            token = desk.token()
            desk.now += 61
            with pytest.raises(TokenExpiredError):
                await desk.join("node-1", token)

    asyncio.run(scene())


def test_an_unknown_token_is_rejected(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            real = parse_token(desk.token())
            forged = f"roost1-{'0' * 40}-{real.fingerprint.removeprefix('sha256:')}"
            with pytest.raises(TokenRejectedError, match="not issued"):
                await desk.join("node-1", forged)

    asyncio.run(scene())


@pytest.mark.parametrize("text", ["", "roost1", "roost1-abc-def", f"roost2-{'0' * 40}-{'0' * 64}", f"roost1-{'0' * 40}-{'0' * 63}"])
def test_a_malformed_token_is_rejected_before_anything_is_sent(desk: Desk, text: str) -> None:
    with pytest.raises(TokenRejectedError, match="not a join token"):
        asyncio.run(enrol("127.0.0.1:1", text, name="node-1", state_dir=desk.directory, deadline_s=1))


def test_a_token_is_not_shown_to_a_server_with_another_certificate(desk: Desk, tmp_path: Path) -> None:
    async def scene() -> None:
        async with desk.open():
            token = desk.token()
            false = Desk(directory=tmp_path / "false")
            async with false.open():
                with pytest.raises(FingerprintError, match="sha256:"):
                    await enrol(false.address, token, name="node-1", state_dir=tmp_path / "n", deadline_s=WAIT_S)
            assert (await desk.join("node-1", token)).credentials.peer_id == "node-1"

    asyncio.run(scene())


def test_a_command_line_with_its_token_works_again_where_it_worked_before(desk: Desk) -> None:
    async def join(token: str, state: str) -> Enrolment:
        directory = desk.directory / state
        return await enrol_once(desk.address, token, name="node-1", state_dir=directory, deadline_s=WAIT_S)

    async def scene() -> None:
        async with desk.open():
            token = desk.token()
            first = await join(token, "here")
            assert await join(token, "here") == first
            with pytest.raises(TokenRejectedError, match="used before"):
                await join(token, "elsewhere")
            renewed = await join(desk.token(), "here")
            assert renewed.credentials.certificate_pem != first.credentials.certificate_pem
            with pytest.raises(TokenRejectedError, match="used before"):
                await join(token, "here")

    asyncio.run(scene())


def test_a_taken_name_is_refused_to_another_key_and_the_token_stays_good(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            await desk.join("node-1")
            token = desk.token()
            with pytest.raises(ForbiddenError, match="node-1"):
                await desk.join("node-1", token, state="thief")
            with pytest.raises(ForbiddenError, match="coordinator"):
                await desk.join("coordinator", token, state="thief")
            await desk.join("node-2", token, state="thief")
            await desk.join("node-1")

    asyncio.run(scene())


def test_a_name_that_is_none_is_refused_on_both_sides(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            with pytest.raises(InvalidConfigError):
                await desk.join("no name", state="n")
            reader, writer = await desk.connect()
            body = b'{"secret":"x","name":"coordinator\\n","csr_pem":"x"}'
            writer.write(HEADER.pack(MAGIC, 1, len(body)) + body)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert b"R101" in answer
            writer.close()

    asyncio.run(scene())


def test_garbage_plain_text_and_slow_clients_do_not_hold_up_a_joiner(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            silent = [await asyncio.open_connection("127.0.0.1", desk.server.port) for _ in range(20)]
            slow = [await desk.connect() for _ in range(5)]
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000)):
                reader, writer = await asyncio.open_connection("127.0.0.1", desk.server.port)
                writer.write(garbage)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), WAIT_S)
                writer.close()
            for number, frame in enumerate((os.urandom(50), HEADER.pack(MAGIC, 1, 5) + b"[1,2]", HEADER.pack(MAGIC, 1, 2) + b"{}")):
                reader, writer = await desk.connect()
                writer.write(frame)
                assert b'"failure":{' in await asyncio.wait_for(reader.read(), WAIT_S), number
                writer.close()
            await asyncio.wait_for(desk.join("node-1"), 2)
            for _, writer in (*silent, *slow):
                writer.close()

    asyncio.run(scene())


def test_a_flood_of_silent_connections_from_one_host_does_not_hold_up_joiners_from_another(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            flood = [
                await asyncio.open_connection("127.0.0.1", desk.server.port, local_addr=("127.0.0.2", 0)) for _ in range(MAX_FROM_ONE_HOST)
            ]
            for _ in range(20):
                # The last ones may still wait to be accepted: what is over the limit is closed once they all have been.
                reader, writer = await asyncio.open_connection("127.0.0.1", desk.server.port, local_addr=("127.0.0.2", 0))
                assert await reader.read() == b""
                writer.close()
            assert (await desk.join("node-1")).credentials.peer_id == "node-1"
            for _, writer in flood:
                writer.close()

    asyncio.run(scene())


def test_an_oversize_request_is_refused_without_reading_it(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            reader, writer = await desk.connect()
            writer.write(HEADER.pack(MAGIC, 1, MAX_ENROLMENT_BYTES + 1))
            assert b"R503" in await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()

    asyncio.run(scene())


def test_a_slow_client_is_dropped_at_the_deadline(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with desk.open(exchange_s=0.1):
            reader, writer = await desk.connect()
            writer.write(MAGIC)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert any("enrolment_late" in record.message for record in caplog.records)


def test_another_protocol_version_is_named_by_the_coordinator(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            reader, writer = await desk.connect()
            writer.write(HEADER.pack(MAGIC, 99, 2) + b"{}")
            assert b"R505" in await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()

    asyncio.run(scene())


async def _fake(desk: Desk, answer: bytes | None) -> asyncio.Server:
    """Serve the desk's certificate, but answer with these bytes, or never."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (desk.directory / "pair.pem").write_bytes(desk.identity.key_pem + desk.identity.certificate_pem)
    context.load_cert_chain(desk.directory / "pair.pem")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, DeadlineError),
        (b"", PeerUnreachableError),
        (HEADER.pack(MAGIC, 99, 0), VersionMismatchError),
        (HEADER.pack(MAGIC, 1, 31) + b'{"grant":null,"failure":null}  ', RoostError),
        (os.urandom(100), RoostError),
    ],
    ids=["never", "cut short", "other version", "empty", "garbage"],
)
def test_what_a_broken_coordinator_answers_is_a_named_error(desk: Desk, answer: bytes | None, error: type[RoostError]) -> None:
    async def scene() -> None:
        async with desk.open():
            fake = await _fake(desk, answer)
            port = fake.sockets[0].getsockname()[1]
            with pytest.raises(error) as caught:
                deadline_s = 0.5 if answer is None else 20.0
                await enrol(f"127.0.0.1:{port}", desk.token(), name="n", state_dir=desk.directory / "n", deadline_s=deadline_s)
            if answer == b"":
                assert "join again with the same name" in caught.value.hint
            fake.close()
            await fake.wait_closed()

    asyncio.run(scene())


def test_nobody_there_and_a_port_that_is_none_are_unreachable(desk: Desk) -> None:
    async def scene() -> None:
        async with desk.open():
            token, address = desk.token(), desk.address
        for where in (address, "nowhere", "127.0.0.1:99999", "[::1]:x"):
            with pytest.raises(PeerUnreachableError):
                await enrol(where, token, name="n", state_dir=desk.directory / "n", deadline_s=5)

    asyncio.run(scene())


def test_a_plain_text_server_is_not_taken_for_a_coordinator(desk: Desk) -> None:
    async def scene() -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 hello\r\n")
            writer.close()

        plain = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with desk.open():
            with pytest.raises(PeerUnreachableError):
                port = plain.sockets[0].getsockname()[1]
                await enrol(f"127.0.0.1:{port}", desk.token(), name="n", state_dir=desk.directory / "n", deadline_s=5)
        plain.close()
        await plain.wait_closed()

    asyncio.run(scene())


def test_a_port_that_is_taken_is_named(desk: Desk, tmp_path: Path) -> None:
    async def scene() -> None:
        async with desk.open():
            second = EnrolmentServer(
                store=desk.store,
                authority=desk.authority,
                identity=desk.identity,
                coordinator=Peer(peer_id="coordinator", address="127.0.0.1:1"),
                clock=lambda: 0.0,
                port=desk.server.port,
            )
            with pytest.raises(InvalidConfigError, match=str(desk.server.port)):
                await second.start()

    asyncio.run(scene())


@pytest.mark.parametrize("damage", [None, b"", b"{}", b"\xff"])
def test_a_state_directory_without_a_coordinator_is_an_error(desk: Desk, damage: bytes | None) -> None:
    async def scene() -> None:
        async with desk.open():
            await desk.join("node-1")

    asyncio.run(scene())
    path = desk.directory / "node-1" / COORDINATOR_FILE
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(CredentialsError):
        Enrolment.load(desk.directory / "node-1")
