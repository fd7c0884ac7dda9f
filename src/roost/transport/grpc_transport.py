"""The network transport: gRPC (asyncio) over mutual TLS, raw bytes on long-lived streams."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any

import grpc.aio

from roost.config import TransportConfig
from roost.errors import CredentialsError, DeadlineError, InvalidConfigError, PeerUnreachableError, RoostError
from roost.messages import Message
from roost.transport.credentials import Credentials
from roost.transport.framing import PackedMessage, pack
from roost.transport.grpc_link import Link, open_channel
from roost.transport.grpc_options import server_options
from roost.transport.grpc_service import FAREWELL_S, Admit, GrpcService
from roost.transport.interface import Buffer, Handler, Lane, Reply, StreamWatcher, Traffic
from roost.transport.meter import Meter
from roost.transport.shaping import frame_bytes
from roost.transport.shown_certificate import ShownCertificate
from roost.types import Peer

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""How long `stop` lets running handlers finish."""
ADDRESS = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")


class GrpcTransport:
    """Talks to peers whose certificate comes from the same authority. Implements `Transport`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        config: TransportConfig | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        admit: Admit | None = None,
    ) -> None:
        """Listens on `host`:`port` (0 picks a free one) once started.

        Tells peers `advertise` if given: a host in place of `host`, or host:port in place of both.

        `admit` is asked for every message that arrives, and raises to refuse the peer.
        """
        self._credentials = credentials
        self._shown = ShownCertificate(credentials)
        self._config = _with_fitting_frames(config or TransportConfig())
        self._host = host
        self._port = port
        self._advertise = advertise
        self._admit = admit
        self._meter = Meter(self._config.uplink_bytes_per_s, self._config.downlink_bytes_per_s)
        self._links: dict[tuple[str, Lane], Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._server: Any = None
        self._service: GrpcService | None = None
        self._address = ""
        self._stopped = False
        self._watcher: StreamWatcher = lambda peer_id, lane, error: None

    @property
    def peer_id(self) -> str:
        return self._credentials.peer_id

    @property
    def address(self) -> str:
        return self._address

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def watch_streams(self, watcher: StreamWatcher) -> None:
        self._watcher = watcher

    async def start(self, handler: Handler) -> None:
        """Begin to listen. Raises InvalidConfigError if the port cannot be had."""
        service = GrpcService(self.peer_id, handler, self._config, self._meter, self._admit)
        server = grpc.aio.server(options=server_options(self._config))
        server.add_generic_rpc_handlers((service.rpc_handlers(),))
        try:
            port = server.add_secure_port(_join(self._host, self._port), self._shown.server_credentials())
        except RuntimeError as error:
            raise InvalidConfigError(f"{self.peer_id} cannot listen on {self._host} port {self._port}: {error}") from error
        await server.start()
        self._server, self._service = server, service
        self._address = self._advertise if ADDRESS.fullmatch(self._advertise) else _join(self._advertise or self._host, port)
        logger.info("listening node=%s address=%s", self.peer_id, self._address)

    async def stop(self) -> None:
        self._stopped = True
        closing = [self._retire(key) for key in list(self._links)]
        if self._service is not None:
            await self._service.drain(STOP_GRACE_S)
        await asyncio.gather(*closing, *self._closing)
        if self._server is not None:
            # Senders that have been told let go at once; calling all off would make grpc report it at both ends.
            await self._server.stop(FAREWELL_S)
            self._server = None

    async def send(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> None:
        packed = pack(message, buffers, self._config)
        link = self._link(peer, lane)
        limit = self._config.send_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                await link.send(packed)
        except TimeoutError as error:
            raise self._late(peer, packed, limit) from error
        finally:
            self._replace_if_broken(link, lane)

    async def call(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        lane: Lane = Lane.TRAINING,
        deadline_s: float | None = None,
    ) -> Reply:
        packed = pack(message, buffers, self._config)
        link = self._link(peer, lane)
        limit = self._config.call_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit):
                return await link.call(packed)
        except TimeoutError as error:
            raise self._late(peer, packed, limit) from error
        finally:
            self._replace_if_broken(link, lane)

    async def forget(self, peer_id: str) -> None:
        await asyncio.gather(*(self._retire(key) for key in list(self._links) if key[0] == peer_id))

    def use_credentials(self, credentials: Credentials) -> None:
        """Show these to peers in new connections; those that are open stay. They must be of the same peer.

        Who connects to this endpoint may see the ones before until a moment in which nobody does (`ShownCertificate`).
        """
        if credentials.peer_id != self.peer_id:
            raise CredentialsError(f"{self.peer_id} cannot become {credentials.peer_id}")
        self._credentials = credentials
        self._shown.replace(credentials)

    def _link(self, peer: Peer, lane: Lane) -> Link:
        if self._stopped:
            raise PeerUnreachableError(f"{self.peer_id} has stopped and cannot reach {peer.peer_id}")
        if not ADDRESS.fullmatch(peer.address):
            raise PeerUnreachableError(f"the address {peer.address!r} of {peer.peer_id} is not host:port")
        key = (peer.peer_id, lane)
        link = self._links.get(key)
        if link is not None and link.peer.address != peer.address:
            self._retire(key)
            link = None
        if link is None:
            channel = open_channel(peer, self._credentials, self._config)
            link = self._links[key] = Link(self.peer_id, peer, lane, channel, self._config, self._meter, on_break=self._link_broke)
        return link

    def _link_broke(self, link: Link, lane: Lane, error: RoostError) -> None:
        self._replace_if_broken(link, lane)
        if not self._stopped:
            self._watcher(link.peer.peer_id, lane, error)

    def _replace_if_broken(self, link: Link, lane: Lane) -> None:
        key = (link.peer.peer_id, lane)
        if link.broken is not None and self._links.get(key) is link:
            # A fresh channel connects at once; the old one would first wait out its backoff.
            self._retire(key)

    def _retire(self, key: tuple[str, Lane]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._links.pop(key).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def _late(self, peer: Peer, packed: PackedMessage, limit: float) -> DeadlineError:
        return DeadlineError(f"{peer.peer_id} at {peer.address} did not take or answer {packed.kind} of {self.peer_id} in {limit:g} s")


def _with_fitting_frames(config: TransportConfig) -> TransportConfig:
    return dataclasses.replace(config, frame_bytes=frame_bytes(config, config.uplink_bytes_per_s))


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
