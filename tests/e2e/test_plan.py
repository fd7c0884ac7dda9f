"""`roost plan` as a person runs it: a script and an imagined pool, processes on this machine, a coordinator that nodes have joined."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from e2e_kit import START_S, Machine, refused

POOL = """
nodes:
  - {name: desk, memory: 1MB, speed: 2}
  - {name: shed, memory: 1MB, count: 2}
"""


def test_a_script_and_an_imagined_pool_give_a_plan_a_picture_and_a_profile(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job).wait()\n")
    pool = machine.home / "pool.yaml"
    pool.write_text(POOL)
    before = sorted(machine.home.rglob("*"))
    made = [tmp_path / "plan.svg", tmp_path / "model.json"]
    result = machine.run("plan", script, "--pool-file", pool, "--svg", made[0], "--save-profile", made[1], 40, 2, tmp_path / "checkpoints")
    assert result.code == 0, result.err
    assert "3 of 3 nodes" in result.out
    assert "your fastest node (desk alone" in result.out
    assert max(map(len, result.out.splitlines())) <= 160
    assert sorted(tmp_path.iterdir()) == sorted([machine.home, *made])
    # torch keeps a folder of its own for temporary files.
    assert sorted(path for path in machine.home.rglob("*") if "torchinductor" not in str(path)) == before
    again = machine.run("plan", "--profile", made[1], "--pool-file", pool, "--json")
    assert again.code == 0, again.err
    assert len(json.loads(again.out)["nodes"]) == 3

    pool.write_text("nodes: [{name: crumb, memory: 1kB}]")
    refused(machine.run("plan", "--profile", made[1], "--pool-file", pool), "R302", "Any one of these would do", "crumb lends")


def test_what_should_change_about_a_plan_once_a_node_is_gone(machine: Machine, tmp_path: Path) -> None:
    script, pool = machine.script("roost.train(job)\n"), machine.home / "pool.yaml"
    pool.write_text(POOL)
    plan, model, after = tmp_path / "plan.json", tmp_path / "model.json", tmp_path / "after.json"
    arguments = ("--pool-file", pool, "--save-plan", plan, "--save-profile", model, "--no-advice")
    saved = machine.run("plan", script, *arguments, 40, 2, tmp_path / "checkpoints")
    assert saved.code == 0, saved.err

    same = machine.run("plan", "--profile", model, "--pool-file", pool, "--current", plan)
    assert same.code == 0, same.err
    assert same.out.startswith("nothing is worth changing: ")

    pool.write_text("nodes: [{name: shed, memory: 1MB, count: 2}]")
    change = machine.run("plan", "--profile", model, "--pool-file", pool, "--current", plan, "--save-plan", after)
    assert change.code == 0, change.err
    assert change.out.startswith("the plan must change (desk gone): ")
    again = machine.run("plan", "--profile", model, "--pool-file", pool, "--current", after, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["change"] is None

    refused(machine.run("plan", "--profile", model, "--pool-file", pool, "--current", model), "R101", "model.json is not a plan")


def test_a_pool_that_nodes_have_joined_is_measured_and_stays_free(machine: Machine, tmp_path: Path) -> None:
    state = machine.home / "coordinator"
    coordinator = machine.start("coordinator", "--port", 0, "--json", "--tokens", 2, "--state-dir", state)
    ready = json.loads(coordinator.until("ready"))
    names = ("desk", "shed")
    nodes = [
        machine.start("join", ready["address"], token, "--name", name, "--memory", "1MB")
        for name, token in zip(names, ready["node_tokens"], strict=True)
    ]
    script = machine.script("roost.train(job).wait()\n")
    access = ["--pool", ready["address"], "--token", ready["requester_token"], "--nodes", 2]
    result = machine.run("plan", script, *access, "--json", 40, 2, tmp_path / "checkpoints")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert {node["node_id"] for node in record["nodes"]} == set(names)
    assert {(link["source"], link["target"]) for link in record["links"]} == {names, names[::-1]}
    assert record["plan"]["samples_per_s"] > 0
    assert list(tmp_path.iterdir()) == [machine.home]

    status = json.loads(machine.run("status", ready["address"], "--json").out)
    assert {node["state"] for node in status["nodes"]} == {"joined"}
    assert status["job_id"] == ""

    # What was planned is what is trained.
    trained = machine.run("train", script, *access, 40, 2, tmp_path / "checkpoints")
    assert trained.code == 0, trained.err
    for command in (*nodes, coordinator):
        command.signal(signal.SIGTERM)
        assert command.wait().code == 0, command.text("err")


def test_nodes_on_this_machine_are_started_for_the_plan_and_gone_after_it(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("roost.train(job)\n")
    command = machine.start("plan", script, "--local", 2, 40, 2, tmp_path / "checkpoints")
    result = command.wait(START_S)
    assert result.code == 0, result.err
    assert "2 of 2 nodes" in result.out or "1 of 2 nodes" in result.out
    assert machine.processes() == []
    assert not (tmp_path / "checkpoints").exists()
    assert not list(machine.home.glob("roost-local-*"))


def test_ctrl_c_while_a_local_pool_is_asked_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    script = machine.script("print('ready', flush=True)\nroost.train(job)\n")
    command = machine.start("plan", script, "--local", 2, 40, 2, tmp_path / "checkpoints")
    command.until("ready")
    command.signal(signal.SIGINT)
    result = command.wait(60)
    assert result.code != 0
    assert machine.processes() == []
