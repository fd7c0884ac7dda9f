from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from roost.config import JobConfig, NamedArguments
from roost.coordinator.store import Store
from roost.errors import ForbiddenError, InvalidConfigError, TokenExpiredError, TokenRejectedError, VersionMismatchError
from roost.messages import Failed, JobState
from roost.types import ClusterPlan, EpochResult, Plan, Role, SegmentPlan, StagePlan

CONFIG = JobConfig(job_id="job-1", optimizer=NamedArguments(name="SGD", arguments=(("lr", 0.1), ("betas", (0.9, 0.99)))), samples=100)
STAGE = StagePlan(
    cluster=0,
    index=0,
    node_id="node-1",
    first_unit=0,
    last_unit=2,
    start=0,
    stop=9,
    max_in_flight=1,
    memory_needed_bytes=1,
    memory_available_bytes=2,
    compute_s=0.5,
    send_s=0.0,
)
PLAN = Plan(
    clusters=(ClusterPlan(index=0, stages=(STAGE,), share=1.0, samples_per_s=2.0, bottleneck="compute of node-1"),),
    segments=(SegmentPlan(index=0, tensors=("weight",), nbytes=4, members=("node-1",)),),
    backups=(),
    samples_per_s=2.0,
    notes=("one node",),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "state" / "roost.db") as opened:
        yield opened


def redeem(store: Store, secret: str, *, peer_id: str = "node-1", key_hash: str = "k1", now: float = 1.0) -> Role:
    return store.redeem_token(secret, peer_id=peer_id, key_hash=key_hash, serial=255, now=now)


def test_a_token_gives_its_role_once(store: Store) -> None:
    secret = store.issue_token(Role.REQUESTER, now=0.0, ttl_s=60)
    assert redeem(store, secret) is Role.REQUESTER
    with pytest.raises(TokenRejectedError, match="used before, by node-1"):
        redeem(store, secret, peer_id="node-2")
    peer = store.peer("node-1")
    assert peer is not None
    assert (peer.role, peer.key_hash, peer.serial, peer.joined_at) == (Role.REQUESTER, "k1", "ff", 1.0)
    assert store.peer("node-2") is None


def test_a_token_that_was_never_issued_is_rejected(store: Store) -> None:
    with pytest.raises(TokenRejectedError, match="not issued"):
        redeem(store, "0" * 40)


def test_a_token_runs_out(store: Store) -> None:
    secret = store.issue_token(Role.NODE, now=0.0, ttl_s=60)
    with pytest.raises(TokenExpiredError):
        redeem(store, secret, now=60.0)
    assert store.peers() == ()
    assert redeem(store, store.issue_token(Role.NODE, now=0.0, ttl_s=60), now=59.9) is Role.NODE


def test_tokens_are_secrets_that_differ_and_are_kept_only_as_hashes(store: Store, tmp_path: Path) -> None:
    secrets = {store.issue_token(Role.NODE, now=0.0, ttl_s=60) for _ in range(20)}
    assert len(secrets) == 20
    assert all(len(secret) * 4 >= 128 for secret in secrets)
    store.close()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    assert not any(secret.encode() in kept for secret in secrets)


def test_no_token_makes_a_coordinator(store: Store) -> None:
    with pytest.raises(ForbiddenError):
        store.issue_token(Role.COORDINATOR, now=0.0, ttl_s=60)


def test_a_taken_name_needs_the_same_key_and_role_and_spends_no_token(store: Store) -> None:
    redeem(store, store.issue_token(Role.NODE, now=0.0, ttl_s=60))
    secret = store.issue_token(Role.NODE, now=0.0, ttl_s=60)
    with pytest.raises(ForbiddenError, match="node-1"):
        redeem(store, secret, key_hash="k2")
    with pytest.raises(ForbiddenError, match="node-1"):
        redeem(store, store.issue_token(Role.REQUESTER, now=0.0, ttl_s=60))
    assert redeem(store, secret, now=7.0) is Role.NODE
    assert [peer.joined_at for peer in store.peers()] == [7.0]


def test_a_second_process_cannot_use_a_token_again(store: Store, tmp_path: Path) -> None:
    secret = store.issue_token(Role.NODE, now=0.0, ttl_s=60)
    with Store(tmp_path / "state" / "roost.db") as other:
        assert redeem(other, secret) is Role.NODE
        with pytest.raises(TokenRejectedError):
            redeem(store, secret, peer_id="node-2")


def test_a_job_is_kept_with_plan_state_and_error(store: Store, tmp_path: Path) -> None:
    store.add_job(CONFIG, now=1.0)
    store.set_plan("job-1", PLAN, now=2.0)
    store.set_state("job-1", JobState.TRAINING, now=3.0)
    store.close()
    with Store(tmp_path / "state" / "roost.db") as again:
        job = again.job("job-1")
        assert job is not None
        assert (job.config, job.plan, job.state, job.submitted_at, job.updated_at) == (CONFIG, PLAN, JobState.TRAINING, 1.0, 3.0)
        assert again.unfinished_jobs() == (job,)
        failed = Failed(code="R602", message="node-1 went away", hint="start it")
        again.set_state("job-1", JobState.FAILED, now=4.0, error=failed)
        assert again.unfinished_jobs() == ()
        assert [job.error for job in again.jobs()] == [failed]


def test_history_is_kept_by_epoch_and_an_epoch_done_again_replaces_itself(store: Store) -> None:
    store.add_job(CONFIG, now=1.0)
    results = [
        EpochResult(epoch=epoch, train_loss=1.0 / epoch, validation_loss=None, metric=0.5, samples=100 * epoch, seconds=2.0 * epoch)
        for epoch in (1, 2)
    ]
    for result in reversed(results):
        store.add_result("job-1", result, now=5.0)
    store.add_result("job-1", results[0], now=6.0)
    assert store.history("job-1") == tuple(results)
    assert store.history("job-2") == ()


def test_what_belongs_to_no_job_is_refused(store: Store) -> None:
    result = EpochResult(epoch=1, train_loss=1.0, validation_loss=None, metric=None, samples=1, seconds=1.0)
    store.add_job(CONFIG, now=1.0)
    with pytest.raises(InvalidConfigError, match="job-1"):
        store.add_job(CONFIG, now=1.0)
    with pytest.raises(InvalidConfigError, match="job-2"):
        store.add_result("job-2", result, now=1.0)
    with pytest.raises(InvalidConfigError, match="job-2"):
        store.set_plan("job-2", PLAN, now=1.0)
    with pytest.raises(InvalidConfigError, match="job-2"):
        store.set_state("job-2", JobState.DONE, now=1.0)
    assert store.job("job-2") is None


def test_the_file_is_private_and_in_wal_mode(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "state" / "roost.db"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "roost.db"
    path.write_bytes(b"something else" * 100)
    with pytest.raises(InvalidConfigError, match="roost.db"):
        Store(path).open()
    assert path.read_bytes() == b"something else" * 100


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "roost.db"
    with Store(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(VersionMismatchError, match="99"):
        Store(path).open()


def test_a_database_that_is_not_open_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="not open"):
        Store(tmp_path / "roost.db").peers()


def test_a_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "roost.db"
    with Store(path) as store:
        redeem(store, store.issue_token(Role.NODE, now=0.0, ttl_s=60))
    old = sqlite3.connect(path)
    for statement in (
        "ALTER TABLE tokens DROP COLUMN replaces",
        "ALTER TABLE peers DROP COLUMN expires_at",
        "ALTER TABLE peers DROP COLUMN revoked_at",
        "DROP TABLE revoked_keys",
        "DROP TABLE running",
        "DROP TABLE journal",
        "PRAGMA user_version = 1",
    ):
        old.execute(statement)
    old.commit()
    old.close()
    with Store(path) as store:
        assert [(peer.peer_id, peer.expires_at, peer.revoked_at) for peer in store.peers()] == [("node-1", None, None)]
        assert not store.is_revoked("k1")
        store.revoke("node-1", now=5.0)
        assert store.is_revoked("k1")


def test_a_key_that_another_process_revokes_is_known_at_once(store: Store, tmp_path: Path) -> None:
    redeem(store, store.issue_token(Role.NODE, now=0.0, ttl_s=60))
    assert not store.is_revoked("k1")
    with Store(tmp_path / "state" / "roost.db") as other:
        assert other.revoke("node-1", now=5.0).revoked_at == 5.0
        assert other.revoke("node-1", now=6.0).revoked_at == 5.0
    assert store.is_revoked("k1")
    with pytest.raises(InvalidConfigError, match="no peer called 'node-2'"):
        store.revoke("node-2", now=5.0)
