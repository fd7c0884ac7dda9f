"""The coordinator's memory: tokens, peers, jobs and their history, in SQLite (WAL).

Used from the event loop's own thread: every statement is short, and SQLite refuses use from any other. Times are seconds since
the epoch and are passed in. Another process ('roost token') may use the same file at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.codec import decode_record, encode_record
from roost.config import JobConfig
from roost.coordinator.job_record import JobRecord, LeaseOperation
from roost.errors import ForbiddenError, InvalidConfigError, TokenExpiredError, TokenRejectedError, VersionMismatchError
from roost.messages import Failed, JobState, SubmitJob
from roost.types import EpochResult, Plan, Role

SCHEMA_VERSION = 3
SECRET_BYTES = 20
BUSY_S = 5.0
"""How long a statement waits for another process that writes."""
ENDED = (JobState.DONE, JobState.FAILED)

_SCHEMA = """
CREATE TABLE tokens (
    secret_hash TEXT PRIMARY KEY, role TEXT NOT NULL, issued_at REAL NOT NULL, expires_at REAL NOT NULL, used_by TEXT, used_at REAL
) STRICT;
CREATE TABLE peers (
    peer_id TEXT PRIMARY KEY, role TEXT NOT NULL, key_hash TEXT NOT NULL, serial TEXT NOT NULL, joined_at REAL NOT NULL
) STRICT;
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY, state TEXT NOT NULL, config TEXT NOT NULL, plan TEXT, submitted_at REAL NOT NULL,
    updated_at REAL NOT NULL, error TEXT
) STRICT;
CREATE TABLE history (
    job_id TEXT NOT NULL REFERENCES jobs (job_id), epoch INTEGER NOT NULL, result TEXT NOT NULL, reached_at REAL NOT NULL,
    PRIMARY KEY (job_id, epoch)
) STRICT;
"""
_CHANGES = {
    1: """
ALTER TABLE tokens ADD COLUMN replaces TEXT;
ALTER TABLE peers ADD COLUMN expires_at REAL;
ALTER TABLE peers ADD COLUMN revoked_at REAL;
CREATE TABLE revoked_keys (key_hash TEXT PRIMARY KEY, peer_id TEXT NOT NULL, revoked_at REAL NOT NULL) STRICT
""",
    2: """
CREATE TABLE running (job_id TEXT PRIMARY KEY REFERENCES jobs (job_id), request TEXT NOT NULL, record TEXT) STRICT;
CREATE TABLE journal (entry INTEGER PRIMARY KEY, job_id TEXT NOT NULL, operation TEXT NOT NULL) STRICT
""",
}
"""What leads from each version of the schema to the next; a new file begins with version 1, too."""


@dataclass(frozen=True, kw_only=True)
class StoredPeer:
    """A peer that has enrolled."""

    peer_id: str
    role: Role
    key_hash: str
    """Hex SHA-256 of its public key: nobody else may take its name."""
    serial: str
    """Of its newest certificate, hex."""
    joined_at: float
    expires_at: float | None = None
    """When its newest certificate runs out; unknown of peers that enrolled before this was kept."""
    revoked_at: float | None = None
    """When it was revoked, if it was."""


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job and where it is."""

    config: JobConfig
    state: JobState
    plan: Plan | None
    submitted_at: float
    updated_at: float
    error: Failed | None


class Store:
    """The database. `open` it before use and `close` it afterwards, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._revoked: frozenset[str] = frozenset()
        self._revoked_as_of = -1
        """What SQLite called the state of the file when `_revoked` was read."""

    def open(self) -> None:
        """Open the file, made first if there is none. Raises InvalidConfigError if it is no such database, VersionMismatchError."""
        hint = "Give the coordinator another state directory, or move this file away: peers must then enrol again."
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Transactions are begun by `_transaction`, not by the driver.
            self._connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
            self._path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode = WAL")
            # A used token must stay used when the power fails.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            version = self._prepare()
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise InvalidConfigError(f"{self._path} cannot be used as the coordinator's database: {error}", hint=hint) from error
        if version != SCHEMA_VERSION:
            self.close()
            raise VersionMismatchError(f"{self._path} has version {version}, this coordinator needs {SCHEMA_VERSION}", hint=hint)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Store:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ tokens and peers

    def issue_token(self, role: Role, now: float, ttl_s: float, *, replaces: str | None = None) -> str:
        """Return a new secret that lets one peer join as `role` until `now + ttl_s`; only its hash is kept.

        With `replaces` it is good for that name alone, which may then have another key or role than before: the old key is revoked.

        Raises ForbiddenError for the coordinator's own role.
        """
        if role is Role.COORDINATOR:
            raise ForbiddenError("a token cannot make a coordinator")
        secret = secrets.token_hex(SECRET_BYTES)
        row = (_hash(secret), role.value, now, now + ttl_s, replaces)
        self._execute("INSERT INTO tokens (secret_hash, role, issued_at, expires_at, replaces) VALUES (?, ?, ?, ?, ?)", row)
        return secret

    def redeem_token(self, secret: str, *, peer_id: str, key_hash: str, serial: int, now: float) -> Role:
        """Use up a token for `peer_id`, record the peer, and return its role: all of it or nothing.

        A peer that enrolled before may do so again under its name with the same key and role; with another one only if the token was
        issued to replace it. A key that was revoked never comes back.
        Raises TokenRejectedError (unknown or used), TokenExpiredError, ForbiddenError (name taken, key revoked: the token stays good).
        """
        with self._transaction() as connection:
            columns = "role, expires_at, used_by, replaces"
            token = connection.execute(f"SELECT {columns} FROM tokens WHERE secret_hash = ?", (_hash(secret),)).fetchone()
            if token is None:
                raise TokenRejectedError("the coordinator has not issued this token")
            role, expires_at, used_by, replaces = Role(token[0]), token[1], token[2], token[3]
            if used_by is not None:
                raise TokenRejectedError(f"this token was used before, by {used_by}")
            if now >= expires_at:
                raise TokenExpiredError(f"this token ran out {now - expires_at:.0f} s ago")
            if replaces not in (None, peer_id):
                raise ForbiddenError(f"this token is for the name {replaces}", hint="Join under that name, or get another token.")
            if connection.execute("SELECT 1 FROM revoked_keys WHERE key_hash = ?", (key_hash,)).fetchone() is not None:
                hint = "Join from a new state directory, with another name or a token of 'roost token --replace NAME'."
                raise ForbiddenError(f"the key that {peer_id} joins with was revoked", hint=hint)
            known = connection.execute("SELECT role, key_hash FROM peers WHERE peer_id = ?", (peer_id,)).fetchone()
            if known is not None and known != (role.value, key_hash) and replaces is None:
                hint = (
                    "Choose another name (the token is still good), join from the state directory the name was made in, "
                    "or get a token with 'roost token --replace NAME'."
                )
                raise ForbiddenError(f"the name {peer_id} belongs to a peer with another key or role", hint=hint)
            if known is not None and known[1] != key_hash:
                self._revoke_key(connection, known[1], peer_id, now)
            connection.execute("UPDATE tokens SET used_by = ?, used_at = ? WHERE secret_hash = ?", (peer_id, now, _hash(secret)))
            connection.execute(
                "INSERT INTO peers (peer_id, role, key_hash, serial, joined_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (peer_id) DO UPDATE SET"
                " role = excluded.role, key_hash = excluded.key_hash, serial = excluded.serial, joined_at = excluded.joined_at,"
                " expires_at = NULL, revoked_at = NULL",
                (peer_id, role.value, key_hash, f"{serial:x}", now),
            )
        return role

    def set_certificate(self, peer_id: str, serial: int, expires_at: float) -> None:
        """Record the newest certificate of an enrolled peer."""
        self._execute("UPDATE peers SET serial = ?, expires_at = ? WHERE peer_id = ?", (f"{serial:x}", expires_at, peer_id))

    def revoke(self, peer_id: str, now: float) -> StoredPeer:
        """Revoke a peer's key for good and return the peer; doing it again changes nothing. Raises InvalidConfigError if there is none."""
        with self._transaction() as connection:
            known = connection.execute("SELECT key_hash FROM peers WHERE peer_id = ?", (peer_id,)).fetchone()
            if known is None:
                raise InvalidConfigError(f"no peer called {peer_id!r} has joined", hint="'roost peers' lists those that have.")
            connection.execute("UPDATE peers SET revoked_at = coalesce(revoked_at, ?) WHERE peer_id = ?", (now, peer_id))
            self._revoke_key(connection, known[0], peer_id, now)
        revoked = self.peer(peer_id)
        assert revoked is not None
        return revoked

    def is_revoked(self, key_hash: str) -> bool:
        """Return whether a key was revoked, by this process or by another: cheap enough to be asked for every message."""
        # The number changes when another connection has changed the file; our own changes reset what we know of it.
        version: int = self._opened().execute("PRAGMA data_version").fetchone()[0]
        if version != self._revoked_as_of:
            self._revoked = frozenset(row[0] for row in self._rows("SELECT key_hash FROM revoked_keys"))
            self._revoked_as_of = version
        return key_hash in self._revoked

    def _revoke_key(self, connection: sqlite3.Connection, key_hash: str, peer_id: str, now: float) -> None:
        row = (key_hash, peer_id, now)
        connection.execute("INSERT OR IGNORE INTO revoked_keys (key_hash, peer_id, revoked_at) VALUES (?, ?, ?)", row)
        self._revoked_as_of = -1

    def peer(self, peer_id: str) -> StoredPeer | None:
        """Return an enrolled peer."""
        return next((peer for peer in self.peers() if peer.peer_id == peer_id), None)

    def peers(self) -> tuple[StoredPeer, ...]:
        """Return every enrolled peer, by name."""
        rows = self._rows("SELECT peer_id, role, key_hash, serial, joined_at, expires_at, revoked_at FROM peers ORDER BY peer_id")
        return tuple(
            StoredPeer(
                peer_id=row[0],
                role=Role(row[1]),
                key_hash=row[2],
                serial=row[3],
                joined_at=row[4],
                expires_at=row[5],
                revoked_at=row[6],
            )
            for row in rows
        )

    # ------------------------------------------------------------ jobs

    def add_job(self, config: JobConfig, now: float) -> None:
        """Record a submitted job. Raises InvalidConfigError if its id is taken."""
        row = (config.job_id, JobState.SUBMITTED.value, _to_text(config), now, now)
        try:
            self._execute("INSERT INTO jobs (job_id, state, config, submitted_at, updated_at) VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise InvalidConfigError(f"there was a job {config.job_id!r} before: a job id must be new") from error

    def set_plan(self, job_id: str, plan: Plan, now: float) -> None:
        """Record the plan of a job. Raises InvalidConfigError if there is no such job."""
        self._change(job_id, "UPDATE jobs SET plan = ?, updated_at = ? WHERE job_id = ?", (_to_text(plan), now, job_id))

    def set_state(self, job_id: str, state: JobState, now: float, *, error: Failed | None = None) -> None:
        """Record where a job is, and why it failed. Raises InvalidConfigError if there is no such job."""
        row = (state.value, _to_text(error) if error is not None else None, now, job_id)
        self._change(job_id, "UPDATE jobs SET state = ?, error = ?, updated_at = ? WHERE job_id = ?", row)

    def job(self, job_id: str) -> StoredJob | None:
        """Return a job."""
        return next(iter(self._jobs("WHERE job_id = ?", (job_id,))), None)

    def jobs(self) -> tuple[StoredJob, ...]:
        """Return every job, the oldest first."""
        return self._jobs("", ())

    def unfinished_jobs(self) -> tuple[StoredJob, ...]:
        """Return the jobs that are neither done nor failed, the oldest first: what a restarted coordinator looks for."""
        return self._jobs("WHERE state NOT IN (?, ?)", tuple(state.value for state in ENDED))

    # ------------------------------------------------------------ what another process goes on with

    def add_request(self, job_id: str, request: SubmitJob) -> None:
        """Keep what was submitted, as long as the job runs."""
        self._execute("INSERT OR REPLACE INTO running (job_id, request) VALUES (?, ?)", (job_id, _to_text(request)))

    def set_record(self, job_id: str, record: JobRecord) -> None:
        """Keep where a job is; the journal begins anew."""
        with self._transaction() as connection:
            connection.execute("UPDATE running SET record = ? WHERE job_id = ?", (_to_text(record), job_id))
            connection.execute("DELETE FROM journal WHERE job_id = ?", (job_id,))

    def add_operation(self, job_id: str, operation: LeaseOperation) -> None:
        """Add to the journal of a job; it is on the disk when this returns."""
        self._execute("INSERT INTO journal (job_id, operation) VALUES (?, ?)", (job_id, _to_text(operation)))

    def running(self, job_id: str) -> tuple[SubmitJob, JobRecord, tuple[LeaseOperation, ...]] | None:
        """Return what was submitted, where the job was, and the journal since then; None if it was not planned yet."""
        row = next(iter(self._rows("SELECT request, record FROM running WHERE job_id = ?", (job_id,))), None)
        if row is None or row[1] is None:
            return None
        lines = self._rows("SELECT operation FROM journal WHERE job_id = ? ORDER BY entry", (job_id,))
        operations = tuple(_from_text(LeaseOperation, line[0]) for line in lines)
        return _from_text(SubmitJob, row[0]), _from_text(JobRecord, row[1]), operations

    def forget_running(self, job_id: str) -> None:
        """A job has ended: nobody goes on with it."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM running WHERE job_id = ?", (job_id,))
            connection.execute("DELETE FROM journal WHERE job_id = ?", (job_id,))

    def add_result(self, job_id: str, result: EpochResult, now: float) -> None:
        """Record what was reached at a synchronisation point; the same epoch again replaces it.

        Raises InvalidConfigError if there is no such job.
        """
        row = (job_id, result.epoch, _to_text(result), now)
        try:
            self._execute("INSERT OR REPLACE INTO history (job_id, epoch, result, reached_at) VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise InvalidConfigError(f"there is no job {job_id!r}") from error

    def history(self, job_id: str) -> tuple[EpochResult, ...]:
        """Return the results of a job, by epoch."""
        rows = self._rows("SELECT result FROM history WHERE job_id = ? ORDER BY epoch", (job_id,))
        return tuple(_from_text(EpochResult, row[0]) for row in rows)

    # ------------------------------------------------------------ statements

    def _prepare(self) -> int:
        with self._transaction() as connection:
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                _run_all(connection, _SCHEMA)
                version = 1
            while version in _CHANGES:
                _run_all(connection, _CHANGES[version])
                version += 1
            if version == SCHEMA_VERSION:
                connection.execute(f"PRAGMA user_version = {version:d}")
        return version

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._opened()
        # Takes the write lock at once, so that what is read cannot have changed when it is acted on.
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise InvalidConfigError(f"the database {self._path} is not open")
        return self._connection

    def _execute(self, statement: str, values: tuple[Any, ...]) -> int:
        return self._opened().execute(statement, values).rowcount

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._opened().execute(statement, values).fetchall()

    def _change(self, job_id: str, statement: str, values: tuple[Any, ...]) -> None:
        if self._execute(statement, values) == 0:
            raise InvalidConfigError(f"there is no job {job_id!r}")

    def _jobs(self, where: str, values: tuple[str, ...]) -> tuple[StoredJob, ...]:
        columns = "config, state, plan, submitted_at, updated_at, error"
        rows = self._rows(f"SELECT {columns} FROM jobs {where} ORDER BY submitted_at, job_id", values)
        return tuple(
            StoredJob(
                config=_from_text(JobConfig, row[0]),
                state=JobState(row[1]),
                plan=_from_text(Plan, row[2]) if row[2] is not None else None,
                submitted_at=row[3],
                updated_at=row[4],
                error=_from_text(Failed, row[5]) if row[5] is not None else None,
            )
            for row in rows
        )


def _run_all(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        connection.execute(statement)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _to_text(record: Any) -> str:
    return json.dumps(encode_record(record), separators=(",", ":"))


def _from_text(kind: type, text: str) -> Any:
    return decode_record(kind, json.loads(text))
