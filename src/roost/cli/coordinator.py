"""`roost coordinator` and `roost token`."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from roost.cli.lifetime import run_until_stopped
from roost.config import CoordinatorConfig, check_identifier, require
from roost.coordinator.certificates import CertificateDesk, refuse_revoked
from roost.coordinator.enrolment import EnrolmentServer, issue_join_token
from roost.coordinator.service import Coordinator
from roost.coordinator.store import Store
from roost.errors import CredentialsError, InvalidConfigError
from roost.transport.authority import EnrolmentIdentity, open_authority, open_enrolment_identity
from roost.transport.credentials import fingerprint
from roost.transport.grpc_transport import GrpcTransport
from roost.types import Peer, Role

COORDINATOR_ID = "coordinator"
DATABASE = "roost.sqlite"


def run(config: CoordinatorConfig, *, tokens: int, json_output: bool, exit_with_parent: bool) -> None:
    """Serve until stopped, after printing how to join."""
    require(0 <= tokens <= 1000, f"tokens must be in 0..1000, not {tokens}")
    try:
        Path(config.state_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidConfigError(f"the state directory {config.state_dir} cannot be made: {error}") from error
    run_until_stopped(_serve(config, tokens=tokens, json_output=json_output), exit_with_parent=exit_with_parent)


async def _serve(config: CoordinatorConfig, *, tokens: int, json_output: bool) -> None:
    directory = Path(config.state_dir)
    authority, identity = open_authority(directory), open_enrolment_identity(directory)
    credentials = authority.create_credentials(COORDINATOR_ID, Role.COORDINATOR)
    with Store(directory / DATABASE) as store:
        port = config.port + 1 if config.port else 0
        admit = partial(refuse_revoked, store)
        transport = GrpcTransport(credentials, host=config.host, port=port, advertise=config.advertise, admit=admit)
        coordinator = Coordinator(config=config, transport=transport, store=store)
        coordinator.restore()
        await transport.start(CertificateDesk(coordinator, store=store, authority=authority))
        enrolment = EnrolmentServer(
            store=store,
            authority=authority,
            identity=identity,
            coordinator=Peer(peer_id=COORDINATOR_ID, address=transport.address),
            clock=time.time,
            host=config.host,
            port=config.port,
        )
        try:
            await enrolment.start()
            address = f"{config.advertise or config.host}:{enrolment.port}"
            node_tokens = [_issue(store, identity, Role.NODE, config.token_ttl_s) for _ in range(tokens)]
            requester_token = _issue(store, identity, Role.REQUESTER, config.token_ttl_s)
            _announce(address, identity, node_tokens, requester_token, json_output=json_output)
            coordinator.take_over()
            await coordinator.watch()
        finally:
            await enrolment.stop()
            await coordinator.close()
            await transport.stop()


def _issue(store: Store, identity: EnrolmentIdentity, role: Role, ttl_s: float, replaces: str | None = None) -> str:
    return issue_join_token(store, identity, role, now=time.time(), ttl_s=ttl_s, replaces=replaces)


def _announce(address: str, identity: EnrolmentIdentity, node_tokens: list[str], requester_token: str, *, json_output: bool) -> None:
    print_fingerprint = fingerprint(identity.certificate_pem)
    if json_output:
        ready = {
            "event": "ready",
            "address": address,
            "fingerprint": print_fingerprint,
            "node_tokens": node_tokens,
            "requester_token": requester_token,
        }
        print(json.dumps(ready), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]Roost coordinator[/] at {address}")
    console.print(f"certificate fingerprint {print_fingerprint}\n")
    console.print("On each machine that lends a hand (each line works once):")
    for token in node_tokens:
        console.print(f"  [bold]roost join {address} {token}[/]")
    console.print("\nOn the machine you train from:")
    console.print(f"  [bold]roost train SCRIPT.py --pool {address} --token {requester_token}[/]")
    console.print("\nMore tokens: roost token --role node    The pool: roost status " + address)
    console.print("Ctrl+C ends the coordinator.")


def open_store(state_dir: Path) -> Store:
    """Return the coordinator's database, not open yet. Raises CredentialsError if no coordinator has run with this state directory."""
    if not (state_dir / DATABASE).exists():
        raise CredentialsError(
            f"no coordinator has run with the state directory {state_dir}",
            hint="Run 'roost coordinator' first, or name its --state-dir.",
        )
    return Store(state_dir / DATABASE)


def print_token(state_dir: Path, *, role: str, ttl_s: float, replaces: str | None = None) -> None:
    """Print a fresh token. Raises CredentialsError if no coordinator has ever run with this state directory."""
    require(role in (Role.NODE, Role.REQUESTER), f"role {role!r} must be node or requester")
    require(ttl_s > 0, f"ttl must be positive, not {ttl_s}")
    if replaces is not None:
        check_identifier(replaces, "the name to replace")
    with open_store(state_dir) as store:
        print(_issue(store, open_enrolment_identity(state_dir), Role(role), ttl_s, replaces))
