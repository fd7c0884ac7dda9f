"""Several machines: a coordinator, nodes that join it, requesters that train on them. Real processes, gRPC and TLS on loopback."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_kit import START_S, Command, Machine, fresh_token, refused, small_job, small_model
from safetensors.torch import load_file
from torch import nn

import roost
from inproc_pool import nodes_for_stages
from roost.errors import RoostError
from roost.requester.pools import RemotePool
from roost.requester.run import RunMetrics
from roost.types import ModelProfile, NodeProfile, Plan

NAMES = ("desk", "shed")


def deep_job(checkpoints: Path, **fields: Any) -> roost.Job:
    """Return a job whose model needs both nodes, as two stages."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3)]
    return small_job(checkpoints, model=nn.Sequential(*layers), max_clusters=1, **fields)


@dataclass
class Network:
    """A coordinator and two nodes, as three machines would run them."""

    machine: Machine
    coordinator: Command
    address: str
    requester_token: str
    node_tokens: list[str]
    nodes: dict[str, Command] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.machine.home / "coordinator"

    def join(self, name: str, memory: int, token: str) -> None:
        """Start a node."""
        self.nodes[name] = self.machine.start("join", self.address, token, "--name", name, "--memory", memory)

    def pool(self, directory: Path, *, nodes: int = 2) -> RemotePool:
        """Return the pool for a requester in this process that has enrolled into `directory`, enrolling it first if need be."""
        token = "" if (directory / "coordinator.json").exists() else fresh_token(self.state, "requester")
        return RemotePool(address=self.address, token=token, nodes=nodes, state_dir=str(directory))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    machine = Machine(tmp_path_factory.mktemp("network"))
    try:
        command = machine.start("coordinator", "--port", 0, "--json", "--tokens", 2, "--state-dir", machine.home / "coordinator")
        ready = json.loads(command.until("ready"))
        network = Network(
            machine=machine,
            coordinator=command,
            address=ready["address"],
            requester_token=ready["requester_token"],
            node_tokens=ready["node_tokens"],
        )
        for name, token in zip(NAMES, network.node_tokens, strict=True):
            network.join(name, memory(machine.home), token)
        yield network
        for command in (*network.nodes.values(), network.coordinator):
            command.signal(signal.SIGTERM)
            assert command.wait().code == 0, command.text("err")
    finally:
        machine.assert_nothing_runs()


def memory(directory: Path) -> int:
    """Return the bytes with which the deep model fits on two nodes and not on one."""
    return nodes_for_stages(deep_job(directory), list(NAMES))[0].memory_bytes


class When:
    """An observer that kills a process once samples have been trained, and then does something else on a thread of its own."""

    def __init__(self, command: Command, *, then: Callable[[], None]) -> None:
        self._command = command
        self._then = then
        self.killed: threading.Thread | None = None

    def planned(self, plan: Plan, nodes: tuple[NodeProfile, ...], profile: ModelProfile) -> None:
        """Nothing."""

    def updated(self, metrics: RunMetrics) -> None:
        """Kill it at the first update with samples."""
        if metrics.samples and self.killed is None:
            self._command.signal(signal.SIGKILL)
            self.killed = threading.Thread(target=self._then)
            self.killed.start()


def test_a_script_trains_on_two_machines_that_joined(network: Network, machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job)\n")
    arguments = ["train", script, "--pool", network.address, "--nodes", 2, "--token", network.requester_token]
    result = machine.run(*arguments, 40, 2, tmp_path / "checkpoints")
    assert result.code == 0, result.err
    assert "epoch 2/2" in result.out
    assert "done after 2.0 of 2 epochs" in result.out
    (checkpoint,) = (tmp_path / "checkpoints").glob("*/epoch-0002")
    small_model().load_state_dict(load_file(checkpoint / "model.safetensors"), strict=True)

    shown = machine.run("status", network.address)
    assert shown.code == 0, shown.err
    assert all(name in shown.out for name in NAMES)
    assert "done" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 90
    status = json.loads(machine.run("status", network.address, "--json").out)
    assert {node["profile"]["node_id"]: node["state"] for node in status["nodes"]} == dict.fromkeys(NAMES, "joined")
    assert (status["job_state"], status["epochs_done"]) == ("done", 2.0)

    # The certificate was kept: this machine needs no token any more.
    run = roost.train(small_job(tmp_path / "checkpoints"), network.address).wait(START_S)
    assert run.metrics().epochs_done == 2.0

    # So the same command line works again on this machine, token and all; elsewhere the token is used up.
    assert machine.run("status", network.address, "--token", network.requester_token).code == 0
    refused(network.machine.run("status", network.address, "--token", network.requester_token), "R401", "used before, by ")


def test_a_fresh_token_lets_another_requester_train_on_two_stages(network: Network, tmp_path: Path) -> None:
    printed = network.machine.run("token", "--role", "requester", "--state-dir", network.state)
    assert printed.code == 0, printed.err
    pool = RemotePool(address=network.address, token=printed.out.strip(), nodes=2, state_dir=str(tmp_path / "requester"))
    run = roost.train(deep_job(tmp_path / "checkpoints", samples=40, epochs=2), pool).wait(START_S)
    assert run.plan is not None
    assert [len(cluster.stages) for cluster in run.plan.clusters] == [2]
    assert run.metrics().samples == 80
    again = roost.train(deep_job(tmp_path / "checkpoints", samples=40, epochs=3), pool, resume=run.checkpoint).wait(START_S)
    assert [result.epoch for result in again.metrics().history] == [3]


def test_two_clusters_average_over_a_ring(network: Network, tmp_path: Path) -> None:
    job = small_job(tmp_path / "checkpoints", samples=200, epochs=3, min_clusters=2, averaging_interval=2)
    run = roost.train(job, network.pool(tmp_path / "requester")).wait(START_S)
    assert run.plan is not None
    assert (len(run.plan.clusters), len(run.plan.rings)) == (2, 1)
    metrics = run.metrics()
    assert metrics.samples == 600
    assert metrics.averaging_rounds >= 3


def test_a_second_job_is_refused_while_one_runs_and_taken_afterwards(network: Network, tmp_path: Path) -> None:
    first = roost.train(small_job(tmp_path / "first", samples=400, epochs=100_000), network.pool(tmp_path / "one"))
    try:
        with pytest.raises(RoostError, match=f"busy with job {first.job_id}") as caught:
            roost.train(small_job(tmp_path / "second"), network.pool(tmp_path / "two"))
        assert caught.value.code == "R604"
    finally:
        first.stop()
        first.wait(START_S)
    assert first.stopped
    assert first.checkpoint is not None
    assert roost.train(small_job(tmp_path / "second"), network.pool(tmp_path / "two")).wait(START_S).metrics().epochs_done == 2.0


def test_a_model_that_is_too_large_for_the_pool_is_refused_with_the_bytes_that_are_missing(network: Network, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(15)), nn.Linear(64, 3))
    job = small_job(tmp_path / "checkpoints", model=model)
    with pytest.raises(RoostError, match=r"2 nodes with .* together cannot hold one cluster.* \([0-9]+ bytes\) short") as caught:
        roost.train(job, network.pool(tmp_path / "requester"))
    assert caught.value.code == "R301"
    assert "What to do" in str(caught.value)


def test_too_few_nodes_end_the_wait_in_time(network: Network, tmp_path: Path) -> None:
    with pytest.raises(RoostError, match="2 of 3 nodes have joined after 1 s") as caught:
        roost.train(small_job(tmp_path / "checkpoints"), network.pool(tmp_path / "requester", nodes=3), wait_s=1)
    assert caught.value.code == "R303"


def test_a_loss_that_is_no_number_ends_the_job_for_the_requester(network: Network, tmp_path: Path) -> None:
    job = small_job(tmp_path / "checkpoints", epochs=100, optimizer_args={"lr": 1e30})
    with pytest.raises(RoostError, match="loss of micro-batch") as caught:
        roost.train(job, network.pool(tmp_path / "requester")).wait(START_S)
    assert caught.value.code == "R601"


def test_a_job_waits_for_a_killed_node_that_its_model_needs_and_goes_on_when_it_is_back(network: Network, tmp_path: Path) -> None:
    victim = network.nodes.pop("shed")
    lent = memory(tmp_path)

    def start_again() -> None:
        victim.wait()
        # Started again with the same command line: its certificate was kept.
        network.join("shed", lent, network.node_tokens[NAMES.index("shed")])

    watch = When(victim, then=start_again)
    job = deep_job(tmp_path / "checkpoints", samples=400, epochs=40, sync_interval=10)
    run = roost.train(job, network.pool(tmp_path / "requester"), observer=watch).wait(START_S)
    assert watch.killed is not None
    watch.killed.join(START_S)
    assert run.metrics().epochs_done == 40.0
    # Nobody else had the weights that were lost with the node.
    assert run.replayed
    assert {node.node_id for node in run.nodes} == set(NAMES)


def test_a_node_that_is_killed_without_a_job_is_not_counted_on(network: Network, tmp_path: Path) -> None:
    victim = network.nodes.pop("shed")
    victim.signal(signal.SIGKILL)
    victim.wait()
    survivor = roost.train(small_job(tmp_path / "checkpoints", max_clusters=1), network.pool(tmp_path / "requester", nodes=1))
    assert survivor.wait(START_S).metrics().epochs_done == 2.0
    assert survivor.plan is not None and {stage.node_id for stage in survivor.plan.stages} == {"desk"}
    network.join("shed", memory(tmp_path), network.node_tokens[NAMES.index("shed")])
    both = roost.train(deep_job(tmp_path / "checkpoints", epochs=1), network.pool(tmp_path / "requester", nodes=2)).wait(START_S)
    assert {node.node_id for node in both.nodes} == set(NAMES)
