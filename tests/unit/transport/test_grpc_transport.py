"""What only the network has: certificates, sockets, processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from transport_kit import WAIT_S, GrpcFleet, Recorder, chunk, peer_of, stopping

from roost.config import TransportConfig
from roost.errors import DeadlineError, InvalidConfigError, MalformedMessageError, PeerUnreachableError, RoostError
from roost.messages import Done, Ping
from roost.transport.authority import create_authority
from roost.transport.credentials import dns_name
from roost.transport.grpc_link import open_channel
from roost.transport.grpc_options import CALL_METHOD, SEND_METHOD
from roost.transport.grpc_transport import GrpcTransport
from roost.transport.interface import Lane, Sender
from roost.types import Peer, Role


@pytest.fixture
def grpc_fleet(tmp_path: Path) -> GrpcFleet:
    return GrpcFleet(tmp_path / "authority")


async def _port(peer: Peer) -> int:
    return int(peer.address.rpartition(":")[2])


def test_ids_that_differ_in_case_or_hold_dots_are_told_apart(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            odd = "Node_1.home-" + "x" * 52
            one, two, seen = grpc_fleet.make("one"), grpc_fleet.make(odd), Recorder()
            await one.start(seen)
            await two.start(Recorder())
            await one.call(peer_of(two), Ping())
            with pytest.raises(PeerUnreachableError):
                await one.call(Peer(peer_id=odd.lower(), address=two.address), Ping())
            await two.call(peer_of(one), Ping())
            assert (await seen.next())[0] == Sender(peer_id=odd, role=Role.NODE)

    asyncio.run(scene())


def test_the_right_authority_but_another_peer_is_not_talked_to(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one, two, seen = grpc_fleet.make("one"), grpc_fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            with pytest.raises(PeerUnreachableError, match="three"):
                await one.send(Peer(peer_id="three", address=two.address), chunk(0))
            with pytest.raises(PeerUnreachableError, match="three"):
                await one.call(Peer(peer_id="three", address=two.address), Ping())
            assert seen.arrived.empty()

    asyncio.run(scene())


@pytest.mark.parametrize("trusting", [False, True], ids=["both differ", "only the client's certificate"])
def test_a_certificate_of_another_authority_is_refused(grpc_fleet: GrpcFleet, tmp_path: Path, trusting: bool) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            two, seen = grpc_fleet.make("two"), Recorder()
            await two.start(seen)
            foreign = create_authority(tmp_path / "foreign").create_credentials("one", Role.NODE)
            if trusting:
                foreign = replace(foreign, authority_pem=grpc_fleet.authority.certificate_pem)
            intruder = GrpcTransport(foreign)
            await intruder.start(Recorder())
            try:
                for _ in range(2):
                    with pytest.raises(PeerUnreachableError):
                        await intruder.call(peer_of(two), Ping())
                    with pytest.raises(PeerUnreachableError):
                        await intruder.send(peer_of(two), chunk(0))
            finally:
                await intruder.stop()
            assert seen.arrived.empty()
            await grpc_fleet.make("one").call(peer_of(two), Ping())

    asyncio.run(scene())


def test_a_client_without_a_certificate_is_refused(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            two, seen = grpc_fleet.make("two"), Recorder()
            await two.start(seen)
            tls = grpc.ssl_channel_credentials(root_certificates=grpc_fleet.authority.certificate_pem)
            options = [("grpc.ssl_target_name_override", dns_name("two"))]
            async with grpc.aio.secure_channel(two.address, tls, options=options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(CALL_METHOD)(b"x", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert seen.arrived.empty()

    asyncio.run(scene())


def test_a_channel_without_tls_is_refused(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            two = grpc_fleet.make("two")
            await two.start(Recorder())
            async with grpc.aio.insecure_channel(two.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(CALL_METHOD)(b"x", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scene())


def test_plain_text_and_garbage_on_the_port_harm_nobody(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one, two = grpc_fleet.make("one"), grpc_fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder())
            await one.call(peer_of(two), Ping())
            silent = await asyncio.open_connection("127.0.0.1", await _port(peer_of(two)))
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(4096),
                b"\x16\x03\x01\xff\xff" + bytes(70_000),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", await _port(peer_of(two)))
                writer.write(garbage)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), WAIT_S)
                writer.close()
                await one.call(peer_of(two), Ping())
            silent[1].close()

    asyncio.run(scene())


@pytest.mark.parametrize("method", [SEND_METHOD, CALL_METHOD])
@pytest.mark.parametrize("frames", [[os.urandom(100)], [b""], [b"\x00\x00\x00\x02\x00\x00\x00\x00{}"], [bytes(3 << 20)] * 3])
def test_garbage_from_a_peer_ends_its_stream_only(grpc_fleet: GrpcFleet, method: str, frames: list[bytes]) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one, two, seen = grpc_fleet.make("one"), grpc_fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(seen)
            await one.send(peer_of(two), chunk(0))
            mad = open_channel(peer_of(two), grpc_fleet.authority.create_credentials("mad", Role.NODE), TransportConfig())
            rpc = mad.stream_stream(method)(iter(frames))
            words = await asyncio.wait_for(rpc.__aiter__().__anext__(), WAIT_S)
            assert b'"type":"Failed"' in words
            await mad.close()
            await one.send(peer_of(two), chunk(1))
            assert [(await seen.next())[1] for _ in range(2)] == [chunk(0), chunk(1)]

    asyncio.run(scene())


def test_a_frame_over_grpcs_limit_is_refused(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            two = grpc_fleet.make("two")
            await two.start(Recorder())
            credentials = grpc_fleet.authority.create_credentials("mad", Role.NODE)
            tls = grpc.ssl_channel_credentials(credentials.authority_pem, credentials.key_pem, credentials.certificate_pem)
            options = [("grpc.ssl_target_name_override", dns_name("two"))]
            async with grpc.aio.secure_channel(two.address, tls, options=options) as mad:
                rpc = mad.stream_stream(SEND_METHOD)(iter([bytes(8 << 20)]))
                with pytest.raises(grpc.aio.AioRpcError):
                    while await asyncio.wait_for(rpc.read(), WAIT_S) is not grpc.aio.EOF:
                        pass
            await grpc_fleet.make("one").call(peer_of(two), Ping())

    asyncio.run(scene())


CHILD = """
import asyncio, sys
from pathlib import Path
from roost.messages import Done
from roost.transport.credentials import Credentials
from roost.transport.grpc_transport import GrpcTransport

class Silent:
    async def on_message(self, sender, message, buffers):
        pass
    async def on_call(self, sender, message, buffers):
        if buffers:
            await asyncio.Event().wait()
        return Done(), ()

async def main():
    transport = GrpcTransport(Credentials.load(Path(sys.argv[1])))
    await transport.start(Silent())
    sys.stdout.write(transport.address + "\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def _spawn(grpc_fleet: GrpcFleet, directory: Path) -> tuple[subprocess.Popen[str], Peer]:
    grpc_fleet.authority.create_credentials("child", Role.NODE).save(directory)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, Peer(peer_id="child", address=child.stdout.readline().strip())


def test_a_killed_process_is_noticed_within_a_second(grpc_fleet: GrpcFleet, tmp_path: Path) -> None:
    async def scene(child: subprocess.Popen[str], peer: Peer) -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one")
            await one.start(Recorder())
            clock = asyncio.get_running_loop().time
            await one.send(peer, chunk(0))
            waiting = asyncio.create_task(one.call(peer, Ping(), [b"wait"]))
            assert (await one.call(peer, Ping())).message == Done()
            child.kill()
            killed = clock()
            with pytest.raises(PeerUnreachableError, match="child"):
                await waiting
            with pytest.raises(PeerUnreachableError, match="child"):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await one.send(peer, chunk(1))
            with pytest.raises(PeerUnreachableError, match="child"):
                await one.send(peer, chunk(2), lane=Lane.AVERAGING)
            assert clock() - killed < 1

    child, peer = _spawn(grpc_fleet, tmp_path / "child")
    try:
        asyncio.run(scene(child, peer))
    finally:
        child.kill()
        child.communicate()


def test_a_frozen_process_is_noticed_by_keepalive_long_before_the_deadline(grpc_fleet: GrpcFleet, tmp_path: Path) -> None:
    async def scene(child: subprocess.Popen[str], peer: Peer) -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one", config=TransportConfig(keepalive_s=1))
            await one.start(Recorder())
            await one.call(peer, Ping())
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineError, match="child"):
                await one.call(peer, Ping(), deadline_s=0.2)
            with pytest.raises(PeerUnreachableError, match="child"):
                await one.call(peer, Ping(), deadline_s=60)

    child, peer = _spawn(grpc_fleet, tmp_path / "child")
    try:
        asyncio.run(scene(child, peer))
    finally:
        child.kill()
        child.communicate()


def test_a_port_that_accepts_but_never_speaks_is_given_up_at_the_connect_deadline(grpc_fleet: GrpcFleet) -> None:
    async def scene(address: str) -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one", config=TransportConfig(connect_s=0.3))
            await one.start(Recorder())
            started = asyncio.get_running_loop().time()
            with pytest.raises(PeerUnreachableError):
                await one.send(Peer(peer_id="two", address=address), chunk(0))
            with pytest.raises(PeerUnreachableError):
                await one.call(Peer(peer_id="two", address=address), Ping())
            assert asyncio.get_running_loop().time() - started < 5

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(scene(f"127.0.0.1:{mute.getsockname()[1]}"))


@pytest.mark.parametrize("address", ["", "nowhere", "unix:/tmp/socket", "host:12:34", "127.0.0.1:x"])
def test_an_address_that_is_not_host_and_port_is_unreachable(grpc_fleet: GrpcFleet, address: str) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one")
            await one.start(Recorder())
            with pytest.raises(PeerUnreachableError, match="not host:port"):
                await one.send(Peer(peer_id="two", address=address), chunk(0))

    asyncio.run(scene())


def test_a_port_that_is_taken_is_named(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one")
            await one.start(Recorder())
            second = GrpcTransport(grpc_fleet.authority.create_credentials("two", Role.NODE), port=await _port(peer_of(one)))
            with pytest.raises(InvalidConfigError, match=str(await _port(peer_of(one)))):
                await second.start(Recorder())

    asyncio.run(scene())


def test_the_advertised_host_is_told_instead_of_the_one_listened_on(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        one = GrpcTransport(grpc_fleet.authority.create_credentials("one", Role.NODE), host="0.0.0.0", advertise="localhost")
        two = grpc_fleet.make("two")
        async with stopping(grpc_fleet):
            await one.start(Recorder())
            await two.start(Recorder())
            assert one.address.startswith("localhost:")
            await two.call(peer_of(one), Ping())
            await one.stop()
            await one.stop()

    asyncio.run(scene())


def test_a_peer_that_moved_is_found_at_its_new_address(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one, two, seen = grpc_fleet.make("one"), grpc_fleet.make("two"), Recorder()
            await one.start(Recorder())
            await two.start(Recorder())
            await one.send(peer_of(two), chunk(0))
            moved = grpc_fleet.make("two")
            await moved.start(seen)
            await one.send(peer_of(moved), chunk(1))
            assert (await seen.next())[1] == chunk(1)

    asyncio.run(scene())


def test_a_plain_tls_client_without_a_certificate_is_cut_off(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            two = grpc_fleet.make("two")
            await two.start(Recorder())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            reader, writer = await asyncio.open_connection("127.0.0.1", await _port(peer_of(two)), ssl=context)
            with pytest.raises(OSError, match="(?i)certificate|reset|closed|alert"):
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                if not await asyncio.wait_for(reader.read(), WAIT_S):
                    raise ConnectionResetError("closed")
            writer.close()

    asyncio.run(scene())


def test_a_reply_that_is_too_large_for_the_caller_is_an_error_there(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one = grpc_fleet.make("one", config=TransportConfig(max_message_bytes=1000))
            two = grpc_fleet.make("two")
            await one.start(Recorder())
            await two.start(Recorder(reply=(Done(), (bytes(5 << 20),))))
            with pytest.raises(RoostError) as caught:
                await one.call(peer_of(two), Ping())
            assert caught.value.code == "R503"

    asyncio.run(scene())


def test_a_reply_that_cannot_be_sent_is_an_error_at_the_caller(grpc_fleet: GrpcFleet) -> None:
    async def scene() -> None:
        async with stopping(grpc_fleet):
            one, two = grpc_fleet.make("one"), grpc_fleet.make("two")
            await one.start(Recorder())
            bad = replace(chunk(0), weight=float("inf"))
            await two.start(Recorder(reply=(bad, ())))
            with pytest.raises(MalformedMessageError):
                await one.call(peer_of(two), Ping())

    asyncio.run(scene())


def test_the_private_key_leaves_no_trace_in_text() -> None:
    with tempfile.TemporaryDirectory() as directory:
        authority = create_authority(Path(directory))
        assert "PRIVATE" not in repr(authority)
        assert "PRIVATE" not in repr(authority.create_credentials("one", Role.NODE))
