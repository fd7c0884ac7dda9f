"""The command line in this process: arguments in; exit code, output and errors out."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from roost.cli import main as command_line
from roost.cli.coordinator import DATABASE, print_token
from roost.coordinator.store import Store
from roost.transport.authority import open_authority, open_enrolment_identity
from roost.transport.enrolment_wire import parse_token

Roost = Callable[..., tuple[int, str, str]]


@pytest.fixture
def roost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Roost:
    """Return a function that runs `roost ARGUMENTS` and gives exit code, standard output and standard error."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ROOST_TOKEN", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roost", *map(str, arguments)])
        # A console keeps the stream that was there when it was made.
        monkeypatch.setattr(command_line, "errors", Console(stderr=True, highlight=False, width=80))
        code = 0
        try:
            command_line.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(result: tuple[int, str, str], code: str, *reasons: str) -> None:
    exit_code, _, text = result
    assert exit_code == 1
    assert f"error [{code}] " in text
    assert "What to do: " in text
    assert "Traceback" not in text
    for reason in reasons:
        assert reason in text


def test_without_arguments_the_commands_are_listed(roost: Roost) -> None:
    _, out, _ = roost()
    assert all(name in out for name in ("coordinator", "token", "join", "train", "status", "demo"))


@pytest.mark.parametrize("arguments", [["fly"], ["join"], ["train"], ["coordinator", "--port", "many"], ["status"]])
def test_wrong_usage_ends_with_code_2(roost: Roost, arguments: list[str]) -> None:
    code, _, error = roost(*arguments)
    assert code == 2
    assert "Usage" in error


def test_a_message_is_not_broken_in_the_middle_of_a_path(roost: Roost, tmp_path: Path) -> None:
    script = tmp_path / ("a-directory-with-a-long-name-" * 4) / "script [v2].py"
    result = roost("train", script, "--local", 1)
    refused(result, "R102", f"there is no file {script}")


# ---------------------------------------------------------------- train


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--pool", "nonsense"], "pool address 'nonsense' must be host:port"),
        (["--pool", "127.0.0.1:7700", "--local", "2"], "--pool and --local exclude each other"),
        (["--local", "-1"], "a local pool has 1 to 256 nodes, not -1"),
        (["--local", "1000"], "a local pool has 1 to 256 nodes, not 1000"),
        (["--pool", "127.0.0.1:7700", "--nodes", "0"], "nodes must be at least 1"),
        (["--token", "x"], "--token goes with --pool"),
        (["--local", "1", "--wait", "0"], "wait must be positive"),
    ],
)
def test_options_that_contradict_are_refused(roost: Roost, tmp_path: Path, arguments: list[str], reason: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    refused(roost("train", script, *arguments), "R101", reason)


def test_a_script_that_trains_nothing_is_told_so(roost: Roost, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\n")
    refused(roost("train", script, "--local", 1), "R102", "ended without calling roost.train(job)")


def test_a_script_that_raises_is_shown_with_its_line(roost: Roost, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def load():\n    raise FileNotFoundError('no data here')\n\n\nload()\n")
    result = roost("train", script, "--local", 1)
    refused(result, "R102", "raised FileNotFoundError: no data here (line 2: raise FileNotFoundError('no data here'))")


def test_a_script_that_is_no_python_is_shown_with_its_line(roost: Roost, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\ny = (\n")
    refused(roost("train", script, "--local", 1), "R102", "raised SyntaxError", "line 2")


def test_a_script_is_run_as_plain_python_would(roost: Roost, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("NAME = 'neighbour'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour_of_script as n\nprint(__name__, n.NAME, sys.argv[1:])\nsys.exit(3)\n")
    code, out, _ = roost("train", script, "--local", 1, "--epochs", 5, "fast")
    assert code == 3
    assert out.splitlines()[-1] == "__main__ neighbour ['--epochs', '5', 'fast']"


def test_training_a_job_without_a_pool_says_how_to_name_one(roost: Roost, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import roost, torch\n"
        "data = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))\n"
        "roost.train(roost.Job(model=torch.nn.Linear(2, 2), loss=torch.nn.functional.cross_entropy, data=data))\n"
    )
    refused(roost("train", script), "R101", "train() was given no pool")


# ---------------------------------------------------------------- coordinator, token, join, status


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "70000"], "port 70000 must be in"),
        (["--port", "0", "--tokens", "-1"], "tokens must be in 0..1000"),
        (["--port", "0", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_a_coordinator_that_cannot_start_says_why(roost: Roost, tmp_path: Path, arguments: list[str], reason: str) -> None:
    refused(roost("coordinator", "--state-dir", tmp_path / "state", *arguments), "R101", reason)


@pytest.mark.parametrize("which", [0, 1])
def test_a_port_in_use_is_named(roost: Roost, tmp_path: Path, which: int) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + which))
        taken.listen()
        result = roost("coordinator", "--port", port, "--state-dir", tmp_path / "state")
    refused(result, "R101", f"cannot listen on 127.0.0.1 port {port + which}")


def test_a_state_directory_that_is_a_file_is_refused(roost: Roost, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = roost("coordinator", "--port", 0, "--state-dir", tmp_path / "file")
    refused(result, "R101", f"{tmp_path / 'file'}")


def prepared_state(directory: Path) -> None:
    """Make what a coordinator leaves behind."""
    open_authority(directory)
    open_enrolment_identity(directory)
    with Store(directory / DATABASE):
        pass


def test_a_token_is_printed_for_the_coordinator_that_ran_here(roost: Roost, tmp_path: Path) -> None:
    prepared_state(tmp_path / "state")
    code, out, _ = roost("token", "--role", "requester", "--state-dir", tmp_path / "state")
    assert code == 0
    assert len(parse_token(out.strip()).secret) == 40


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--role", "king"], "role 'king' must be node or requester"), (["--ttl", "0"], "ttl must be positive"), (["--ttl", "nan"], "ttl")],
)
def test_tokens_with_wrong_options_are_refused(roost: Roost, tmp_path: Path, arguments: list[str], reason: str) -> None:
    prepared_state(tmp_path / "state")
    refused(roost("token", "--state-dir", tmp_path / "state", *arguments), "R101", reason)


def test_there_is_no_token_where_no_coordinator_has_run(roost: Roost, tmp_path: Path) -> None:
    refused(roost("token", "--state-dir", tmp_path / "nothing"), "R405", "no coordinator has run", "roost coordinator")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(Exception, match="no coordinator has run"):
        print_token(tmp_path / "nothing", role="node", ttl_s=1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--name", "a b"], "R101", "node name 'a b'"),
        (["--name", "a", "--memory", "lots"], "R101", "size 'lots'"),
        (["--name", "a", "--device", "tpu"], "R101", "device 'tpu' must be cpu, cuda or mps"),
        (["--name", "a", "--relative-speed", "2"], "R101", "relative_speed must be in (0, 1]"),
        (["--name", "a"], "R405", "this machine has not joined 127.0.0.1:1 before"),
    ],
)
def test_joining_with_wrong_options_is_refused(roost: Roost, arguments: list[str], code: str, reason: str) -> None:
    refused(roost("join", "127.0.0.1:1", *arguments), code, reason)


@pytest.mark.parametrize("token", ["x", "roost1", "a.b.c", "é" * 50])
def test_what_is_no_token_is_refused(roost: Roost, token: str) -> None:
    refused(roost("join", "127.0.0.1:1", token, "--name", "a"), "R401", "roost token")


def test_where_nothing_listens_nothing_is_joined(roost: Roost, tmp_path: Path) -> None:
    prepared_state(tmp_path / "state")
    _, out, _ = roost("token", "--state-dir", tmp_path / "state")
    address = f"127.0.0.1:{free_port()}"
    refused(roost("join", address, out.strip(), "--name", "a"), "R501", f"the coordinator at {address} cannot be reached")
    refused(roost("status", address, "--token", out.strip()), "R501", f"the coordinator at {address} cannot be reached")


def test_status_of_a_coordinator_that_does_not_know_us_says_how_to_enrol(roost: Roost) -> None:
    refused(roost("status", "127.0.0.1:1"), "R405", "has not enrolled with 127.0.0.1:1", "--token")
