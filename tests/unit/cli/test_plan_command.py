"""`roost plan` in this process: arguments in; exit code, output, files and errors out. Nothing is trained."""

from __future__ import annotations

import contextvars
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from plan_kit import pool_file, saved_model
from rich.console import Console

from inproc_pool import InprocPool, node
from roost.api import PreparedJob
from roost.cli import main as command_line
from roost.cli import plan as command
from roost.cli.plan import PlanCommand
from roost.codec import decode_record
from roost.errors import NodeTooSmallError, PoolTooSmallError, RoostError, StageFailedError
from roost.planning.advice import Advice
from roost.requester.model_file import ModelFile
from roost.requester.plan_file import load_plan
from roost.types import Plan

TWO = "nodes: [{name: desk, memory: 100MB}, {name: shed, memory: 100MB, speed: 0.5}]"
SMALL = "nodes: [{name: desk, memory: 5MB}, {name: shed, memory: 4MB}]"

SCRIPT = """
import sys, torch, roost
from torch import nn

torch.manual_seed(0)
data = torch.rand(16, 4), torch.randint(3, (16,))
job = roost.Job(
    model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    loss=nn.functional.cross_entropy,
    data=data,
    batch_size=4,
    optimizer="SGD",
    optimizer_args={"lr": 0.1},
    checkpoint_dir=sys.argv[1],
)
print("the script talks")
"""

Roost = Callable[..., tuple[int, str, str]]


@pytest.fixture
def roost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Roost:
    """Return a function that runs `roost plan ARGUMENTS` and gives exit code, standard output and standard error."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ROOST_TOKEN", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roost", "plan", *map(str, arguments)])
        monkeypatch.setattr(command_line, "errors", Console(stderr=True, highlight=False, width=80))
        code = 0
        try:
            contextvars.copy_context().run(command_line.main)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def script(directory: Path, lines: str) -> Path:
    path = directory / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(lines))
    return path


def refused(result: tuple[int, str, str], code: str, *reasons: str) -> None:
    exit_code, out, text = result
    assert exit_code == 1, result
    assert out == ""
    assert f"error [{code}] " in text
    assert "Traceback" not in text
    for reason in reasons:
        assert reason in text


# ---------------------------------------------------------------- imagined pools


def test_a_saved_model_on_an_imagined_pool_is_planned_at_once(roost: Roost, tmp_path: Path) -> None:
    code, out, error = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO))
    assert (code, error) == (0, "")
    assert "made-up: 2 clusters on 2 of 2 nodes" in out
    assert "1.5x your fastest node (desk alone: " in out
    assert "what would change it" in out


def test_the_json_is_all_that_is_printed(roost: Roost, tmp_path: Path) -> None:
    code, out, _ = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--json")
    assert code == 0
    (line,) = out.splitlines()
    record = json.loads(line)
    plan = decode_record(Plan, record["plan"])
    assert {stage.node_id for stage in plan.stages} == {"desk", "shed"}
    assert decode_record(Advice, record["advice"]).ratio == pytest.approx(1.5, rel=0.05)


def test_equal_inputs_are_planned_alike(roost: Roost, tmp_path: Path) -> None:
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--json")
    assert roost(*arguments) == roost(*arguments)


def test_without_advice_only_the_plan_is_made(roost: Roost, tmp_path: Path) -> None:
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--no-advice")
    _, out, _ = roost(*arguments)
    assert "what would change it" not in out
    assert json.loads(roost(*arguments, "--json")[1])["advice"] is None


def test_the_picture_is_written(roost: Roost, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    code, _, _ = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--svg", picture)
    assert code == 0
    assert picture.read_text().startswith("<svg ")
    assert "desk" in picture.read_text()


def test_settings_in_the_pool_file_count(roost: Roost, tmp_path: Path) -> None:
    text = TWO + "\njob: {max_clusters: 1, averaging_interval: 5}"
    record = json.loads(roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, text), "--json")[1])
    assert len(record["plan"]["clusters"]) == 1
    assert (record["config"]["max_clusters"], record["config"]["averaging_interval"]) == (1, 5)


def test_planning_for_a_saved_model_never_imports_torch(tmp_path: Path) -> None:
    program = """
        import sys
        from roost.cli.main import main
        sys.argv = ["roost", "plan", "--profile", sys.argv[1], "--pool-file", sys.argv[2]]
        try:
            main()
        except SystemExit as error:
            assert not error.code
        assert "torch" not in sys.modules
        assert "numpy" in sys.modules
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(saved_model(tmp_path)), str(pool_file(tmp_path, TWO))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- what should change about a plan

THREE = "nodes: [{name: desk, memory: 100MB}, {name: shed, memory: 100MB, speed: 0.5}, {name: barn, memory: 100MB}]"


@pytest.fixture
def current(roost: Roost, tmp_path: Path) -> Path:
    """Return the file of the plan for the pool TWO."""
    path = tmp_path / "plan.json"
    code, _, error = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--save-plan", path, "--no-advice")
    assert (code, error) == (0, "")
    return path


def test_the_plan_that_is_saved_is_the_one_that_is_shown(roost: Roost, current: Path, tmp_path: Path) -> None:
    record = json.loads(roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--json")[1])
    assert load_plan(current) == decode_record(Plan, record["plan"])
    assert record["change"] is None


def test_on_the_same_pool_nothing_should_change(roost: Roost, current: Path, tmp_path: Path) -> None:
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--current", current)
    code, out, error = roost(*arguments)
    assert (code, error) == (0, "")
    assert out.startswith("nothing is worth changing: no change would train 2% more within 600 s\nas it is, the plan reaches ")
    assert "made-up: 2 clusters on 2 of 2 nodes" in out
    assert "what would change it" not in out
    record = json.loads(roost(*arguments, "--json")[1])
    assert (record["change"], record["advice"], record["error"]) == (None, None, None)
    assert decode_record(Plan, record["plan"]) == load_plan(current)


def test_a_node_more_is_put_to_use_and_its_bytes_are_named(roost: Roost, current: Path, tmp_path: Path) -> None:
    picture, after = tmp_path / "after.svg", tmp_path / "after.json"
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, THREE), "--current", current)
    code, out, error = roost(*arguments, "--svg", picture, "--save-plan", after)
    assert (code, error) == (0, "")
    assert out.startswith("the plan should change: barn forms a cluster: 6.0 MB move in ")
    assert " -> barn: layers.0 .. 5, 6.0 MB in " in out
    assert "(+67%); it has paid for itself after " in out
    assert "made-up: 3 clusters on 3 of 3 nodes" in out
    assert "barn" in picture.read_text()
    record = json.loads(roost(*arguments, "--json")[1])
    assert load_plan(after) == decode_record(Plan, record["plan"])
    assert (record["change"]["forced"], record["advice"]) == (False, None)
    (move,) = record["change"]["moves"]
    assert (move["target"], move["nbytes"]) == ("barn", 6_000_000)


def test_a_node_that_is_gone_forces_a_change(roost: Roost, current: Path, tmp_path: Path) -> None:
    pool = pool_file(tmp_path, "nodes: [{name: shed, memory: 100MB, speed: 0.5}]")
    code, out, _ = roost("--profile", saved_model(tmp_path), "--pool-file", pool, "--current", current)
    assert code == 0
    assert out.startswith("the plan must change (desk gone): the cluster of desk is dissolved: nothing has to move, then ")
    assert "no node has to wait; +" in out
    assert "it pays from the first moment on" in out


def test_with_little_time_to_pay_nothing_is_moved(roost: Roost, current: Path, tmp_path: Path) -> None:
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, THREE), "--current", current)
    _, out, _ = roost(*arguments, "--payback-s", "0.01")
    assert out.startswith("nothing is worth changing: no change would train 2% more within 0.01 s")
    assert "barn is a backup: what it would add, if anything, is not worth the bytes" in " ".join(out.split())


def test_a_pool_that_can_no_longer_hold_the_model_fails_with_what_would_do(roost: Roost, current: Path, tmp_path: Path) -> None:
    arguments = ("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, SMALL), "--current", current)
    refused(roost(*arguments), "R301", "short", "Any one of these would do:", "desk lends ")
    code, out, _ = roost(*arguments, "--json")
    assert code == 1
    assert (json.loads(out)["plan"], json.loads(out)["change"]) == (None, None)


def test_a_plan_of_another_model_is_refused_before_anything_is_planned(
    roost: Roost, current: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("make_plan", "propose_change", "local"):
        monkeypatch.delattr(command, name)
    other = saved_model(tmp_path, units=7)
    for pool in (("--pool-file", pool_file(tmp_path, TWO)), ("--pool", "127.0.0.1:1")):
        refused(roost("--profile", other, *pool, "--current", current), "R101", "plan.json: the plan is not one of made-up:")


def test_a_script_is_asked_for_its_change_too(roost: Roost, tmp_path: Path) -> None:
    path, plan = script(tmp_path, "roost.train(job)"), tmp_path / "plan.json"
    assert roost(path, tmp_path, "--pool-file", pool_file(tmp_path, TWO), "--save-plan", plan, "--no-advice")[0] == 0
    code, out, error = roost(path, tmp_path, "--pool-file", pool_file(tmp_path, TWO), "--current", plan)
    assert (code, error) == (0, "")
    assert out.startswith("the script talks\nnothing is worth changing")


# ---------------------------------------------------------------- pools that are too small


def test_a_pool_that_is_too_small_fails_with_all_that_would_do(roost: Roost, tmp_path: Path) -> None:
    result = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, SMALL))
    refused(result, "R301", "short", "Any one of these would do:", "desk lends ", "samples/s predicted")


def test_a_pool_that_is_too_small_is_json_too_and_fails_all_the_same(roost: Roost, tmp_path: Path) -> None:
    code, out, error = roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, SMALL), "--json")
    assert code == 1
    assert "error [R301]" in error
    record = json.loads(out)
    assert (record["plan"], record["advice"]) == (None, None)
    assert record["error"]["short_bytes"] > 0
    assert {"memory"} <= {change["kind"] for change in record["error"]["changes"]}


def test_without_advice_the_error_keeps_its_own_hint(tmp_path: Path) -> None:
    request = PlanCommand(profile=saved_model(tmp_path), pool_file=pool_file(tmp_path, SMALL), advice=False)
    with pytest.raises(PoolTooSmallError) as caught:
        command.run(request)
    assert caught.value.hint == PoolTooSmallError.default_hint


def test_a_unit_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    request = PlanCommand(profile=saved_model(tmp_path), pool_file=pool_file(tmp_path, "nodes: [{name: a, memory: 1MB}]"))
    with pytest.raises(NodeTooSmallError, match="layers") as caught:
        command.run(request)
    assert "a lends" in caught.value.hint


# ---------------------------------------------------------------- scripts


def test_a_script_runs_up_to_train_and_nothing_is_left_behind(roost: Roost, tmp_path: Path) -> None:
    path = script(tmp_path, "roost.train(job)\nraise AssertionError('too far')")
    before = sorted(tmp_path.iterdir())
    pool = pool_file(tmp_path, TWO)
    code, out, error = roost(path, "--pool-file", pool, tmp_path / "checkpoints")
    assert (code, error) == (0, "")
    assert out.startswith("the script talks\njob: ")
    assert sorted(tmp_path.iterdir()) == sorted([*before, pool])


def test_what_a_script_prints_does_not_disturb_the_json(roost: Roost, tmp_path: Path) -> None:
    code, out, error = roost(script(tmp_path, "roost.train(job)"), tmp_path, "--pool-file", pool_file(tmp_path, TWO), "--json")
    assert code == 0
    assert json.loads(out)["model"]["name"] == "job"
    assert "the script talks" in error


def test_a_model_is_saved_and_planned_for_again(roost: Roost, tmp_path: Path) -> None:
    pool, saved = pool_file(tmp_path, TWO), tmp_path / "model.json"
    _, first, _ = roost(script(tmp_path, "roost.train(job)"), tmp_path, "--pool-file", pool, "--save-profile", saved, "--json")
    assert ModelFile.load(saved).config.batch_size == 4
    _, second, _ = roost("--profile", saved, "--pool-file", pool, "--json")
    assert json.loads(first)["plan"] == json.loads(second)["plan"]


def test_the_pool_that_the_script_names_is_used_if_no_other_is(tmp_path: Path) -> None:
    path = script(tmp_path, "roost.train(job, pool=roost.local(3))")

    def run() -> PreparedJob | None:
        model, pool = command._run_script(path, (str(tmp_path),))
        assert model.profile.name == "job"
        return pool  # type: ignore[return-value]

    assert getattr(contextvars.copy_context().run(run), "size", 0) == 3


def test_a_script_may_train_in_a_function_and_exit_in_peace(roost: Roost, tmp_path: Path) -> None:
    path = script(tmp_path, "try:\n    roost.train(job).wait()\nfinally:\n    print('tidied up')\n")
    code, out, _ = roost(path, tmp_path, "--pool-file", pool_file(tmp_path, TWO))
    assert code == 0
    assert "tidied up" in out


@pytest.mark.parametrize(
    ("lines", "code", "reason"),
    [
        ("", "R102", "ended without calling roost.train(job)"),
        ("1 / 0", "R102", "raised ZeroDivisionError: division by zero (line "),
        ("roost.train(roost.Job(model=job.model, loss=job.loss, data=data, batch_size=0))", "R101", "batch_size must be positive"),
        ("import dataclasses\nroost.train(dataclasses.replace(job, data=(torch.rand(0, 4), torch.rand(0))))", "R101", "data is empty"),
    ],
)
def test_scripts_that_do_not_get_to_a_plan_say_why(roost: Roost, tmp_path: Path, lines: str, code: str, reason: str) -> None:
    exit_code, _, error = roost(script(tmp_path, lines), tmp_path, "--pool-file", pool_file(tmp_path, TWO))
    assert exit_code == 1
    assert f"error [{code}]" in error
    assert reason in error


def test_a_script_that_is_not_there_is_named(roost: Roost, tmp_path: Path) -> None:
    refused(roost(tmp_path / "none.py", "--pool-file", pool_file(tmp_path, TWO)), "R102", "there is no file")


def test_a_script_without_any_pool_is_told_the_three_ways(roost: Roost, tmp_path: Path) -> None:
    _, _, error = roost(script(tmp_path, "roost.train(job)"), tmp_path)
    assert "error [R101] no pool to plan for" in error
    assert all(option in error for option in ("--pool-file", "--pool", "--local"))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either a script or --profile"),
        (["script.py", "--profile", "model.json"], "give either a script or --profile"),
        (["--profile", "model.json"], "no pool to plan for"),
        (["--profile", "model.json", "--local", "2", "--pool", "a:1"], "--pool and --local exclude each other"),
        (["--profile", "model.json", "--local", "2", "--pool-file", "pool.yaml"], "--pool-file and --local exclude each other"),
        (["--profile", "model.json", "--local", "-1"], "a local pool has 1 to 256 nodes"),
        (["--profile", "model.json", "--pool", "nonsense"], "must be host:port"),
        (["--profile", "model.json", "--pool", "a:1", "--nodes", "0"], "nodes must be at least 1"),
        (["--profile", "model.json", "--local", "1", "--nodes", "-1"], "nodes must be at least 1, not -1"),
        (["--profiel", "model.json", "--local", "1"], "unknown option '--profiel'"),
        (["--profile", "model.json", "--local", "1", "--token", "x"], "--token goes with --pool"),
        (["--profile", "model.json", "--local", "1", "--wait", "0"], "wait must be positive"),
        (["--profile", "model.json", "--local", "1", "--svg", "no/such/plan.svg"], "there is no directory no/such"),
        (["--profile", "model.json", "--local", "1", "--save-plan", "no/such/plan.json"], "there is no directory no/such"),
        (["--profile", "model.json", "--local", "1", "--payback-s", "60"], "--payback-s goes with --current"),
        (["--profile", "model.json", "--local", "1", "--current", "model.json", "--payback-s", "0"], "payback-s must be positive"),
        (["--profile", "model.json", "--local", "1", "--current", "model.json", "--payback-s", "inf"], "payback-s must be positive"),
        (["--profile", "model.json", "--local", "1", "--current", "none.json"], "none.json: the plan cannot be read"),
        (["--profile", "model.json", "--local", "1", "--current", "model.json"], "model.json is not a plan"),
        (["--profile", "none.json", "--local", "1"], "none.json: the model's profile cannot be read"),
        (["--profile", "model.json", "--pool-file", "none.yaml"], "none.yaml: the file cannot be read"),
        (["--profile", "pool.yaml", "--pool-file", "pool.yaml"], "pool.yaml is not a model's profile"),
    ],
)
def test_options_that_contradict_are_refused(
    roost: Roost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    saved_model(tmp_path)
    pool_file(tmp_path, TWO)
    monkeypatch.chdir(tmp_path)
    refused(roost(*arguments), "R101", reason)


def test_a_mistake_in_the_pool_file_shows_before_the_script_runs(roost: Roost, tmp_path: Path) -> None:
    refused(
        roost(script(tmp_path, ""), "--pool-file", pool_file(tmp_path, "nodes: [{memory: 1, sped: 2}]")), "R101", "unknown field 'sped'"
    )


def test_a_token_in_the_environment_does_not_matter_without_a_pool(roost: Roost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_TOKEN", "roost1-x")
    assert roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO))[0] == 0


def test_a_picture_that_cannot_be_written_is_named(roost: Roost, tmp_path: Path) -> None:
    refused(
        roost("--profile", saved_model(tmp_path), "--pool-file", pool_file(tmp_path, TWO), "--svg", tmp_path),
        "R101",
        "the picture cannot be written: Is a directory",
    )


# ---------------------------------------------------------------- pools that answer


def test_a_pool_is_asked_for_its_nodes_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = InprocPool([node("one"), node("two")], tmp_path)
    monkeypatch.setattr(command, "local", lambda nodes: pool)
    command.run(PlanCommand(profile=saved_model(tmp_path), local_nodes=2, json_output=True))
    record = json.loads(capsys.readouterr().out)
    assert {item["node_id"] for item in record["nodes"]} == {"one", "two"}
    assert {(item["source"], item["target"]) for item in record["links"]} == {("one", "two"), ("two", "one")}
    assert {stage.node_id for stage in decode_record(Plan, record["plan"]).stages} == {"one", "two"}


def test_a_pool_is_asked_what_is_left_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, profile = tmp_path / "plan.json", saved_model(tmp_path)
    names = ["one", "two"]
    monkeypatch.setattr(command, "local", lambda nodes: InprocPool([node(name) for name in names], tmp_path))
    command.run(PlanCommand(profile=profile, local_nodes=2, save_plan=path, advice=False))
    names[:] = ["two", "three"]
    capsys.readouterr()
    command.run(PlanCommand(profile=profile, local_nodes=2, current=path, json_output=True))
    record = json.loads(capsys.readouterr().out)
    assert {item["node_id"] for item in record["nodes"]} == {"two", "three"}
    assert record["change"]["forced"]
    assert "one" not in {stage.node_id for stage in decode_record(Plan, record["plan"]).stages}


def test_a_pool_that_is_too_small_gives_the_changes_that_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "local", lambda nodes: InprocPool([node("one", memory=5_000_000)], tmp_path))
    with pytest.raises(PoolTooSmallError, match="short") as caught:
        command.run(PlanCommand(profile=saved_model(tmp_path), local_nodes=1))
    assert "one lends" in caught.value.hint


def test_too_few_nodes_are_waited_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "local", lambda nodes: InprocPool([], tmp_path))
    with pytest.raises(RoostError, match="0 of 1 nodes have joined"):
        command.run(PlanCommand(profile=saved_model(tmp_path), local_nodes=1, wait_s=0.1))


def test_a_pool_that_breaks_while_it_is_asked_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking(InprocPool):
        def enter(self, *, on_failure: Callable[[RoostError], None]) -> object:  # type: ignore[override]
            on_failure(StageFailedError("the node-1 process ended"))
            on_failure(StageFailedError("only the first is told"))
            return super().enter(on_failure=on_failure)

    monkeypatch.setattr(command, "local", lambda nodes: Breaking([], tmp_path))
    with pytest.raises(StageFailedError, match="the node-1 process ended"):
        command.run(PlanCommand(profile=saved_model(tmp_path), local_nodes=1))


# ---------------------------------------------------------------- errors and scripts that do not play along


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--profile", "none.json", "--local", "1", "--json"], "R101", "none.json: the model's profile cannot be read"),
        (["none.py", "--local", "1", "--json"], "R102", "there is no file none.py"),
        (["--json"], "R101", "give either a script or --profile"),
    ],
)
def test_any_error_is_one_line_of_json_too(
    roost: Roost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, out, text = roost(*arguments)
    (line,) = out.splitlines()
    record = json.loads(line)
    assert exit_code == 1
    assert (record["plan"], record["error"]["code"]) == (None, code)
    assert reason in record["error"]["message"]
    assert record["error"]["hint"]
    assert f"error [{code}]" in text


def test_a_script_that_exits_before_it_trains_is_named_with_its_code(roost: Roost, tmp_path: Path) -> None:
    path = script(tmp_path, "sys.exit(3)\nroost.train(job)")
    exit_code, _, error = roost(path, tmp_path, "--pool-file", pool_file(tmp_path, TWO))
    assert exit_code == 1
    assert "error [R102]" in error
    assert "ended with exit code 3 without calling roost.train(job)" in error


@pytest.mark.parametrize("after", ["sys.exit(3)", "1 / 0", "roost.train(None)"])
def test_what_a_script_does_after_it_was_captured_does_not_matter(roost: Roost, tmp_path: Path, after: str) -> None:
    path = script(tmp_path, f"try:\n    roost.train(job)\nexcept SystemExit:\n    {after}\n")
    code, out, _ = roost(path, tmp_path, "--pool-file", pool_file(tmp_path, TWO), "--no-advice")
    assert code == 0
    assert "job: " in out


def test_what_a_script_prints_past_python_does_not_disturb_the_json(tmp_path: Path) -> None:
    lines = """
        import os, subprocess
        os.write(1, b"raw\\n")
        subprocess.run([sys.executable, "-c", "print('child')"])
        sys.__stdout__.write("original\\n")
        roost.train(job)
    """
    arguments = [script(tmp_path, lines), tmp_path, "--pool-file", pool_file(tmp_path, TWO), "--no-advice", "--json"]
    program = [sys.executable, "-m", "roost.cli.main", "plan", *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"] is None
    assert {"raw", "child", "original"} <= set(done.stderr.split())
