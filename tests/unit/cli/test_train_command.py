"""`roost train` on a pool in this process: what scripts do, and what is left of it."""

from __future__ import annotations

import contextvars
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inproc_pool import InprocPool, node
from roost.cli.lifetime import stop_on_sigterm
from roost.cli.train import run_script
from roost.errors import RoostError

SCRIPT = """
import signal, sys, torch, roost
from torch import nn

torch.manual_seed(0)
count = int(sys.argv[2])
data = torch.rand(count, 4), torch.randint(3, (count,))
job = roost.Job(
    model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    loss=nn.functional.cross_entropy,
    data=data,
    batch_size=4,
    epochs=int(sys.argv[3]),
    optimizer="SGD",
    optimizer_args={"lr": 0.1},
    checkpoint_dir=sys.argv[1],
)
"""

Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Return a function that runs SCRIPT with these lines added, and gives what was printed."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(lines: str, *, samples: int = 16, epochs: int = 2) -> str:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT + textwrap.dedent(lines))
        arguments = [str(tmp_path / "checkpoints"), str(samples), str(epochs)]
        pool = InprocPool([node("only")], tmp_path)
        contextvars.copy_context().run(run_script, script, arguments, pool, wait_s=30.0)
        return capsys.readouterr().out

    return run


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").glob("*/*-*") if path.is_dir())


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("roost-run")]


def test_a_script_need_not_wait_and_the_result_is_shown(train: Train, tmp_path: Path) -> None:
    out = train("roost.train(job)")
    assert "cluster 0: 100% of the data" in out
    assert "epoch 2/2" in out
    assert "done after 2.0 of 2 epochs" in out
    assert saved(tmp_path) == ["epoch-0001", "epoch-0002"]
    assert 'epoch-0002/model.safetensors"))' in out


def test_a_script_may_wait_use_the_model_and_exit_with_0(train: Train) -> None:
    out = train("run = roost.train(job).wait()\nprint(sorted(run.state_dict()))\nsys.exit(0)")
    assert "['0.bias', '0.weight', '2.bias', '2.weight']" in out
    assert "done after 2.0 of 2 epochs" in out


def test_a_script_may_train_twice(train: Train) -> None:
    out = train("roost.train(job).wait()\nroost.train(job).wait()")
    assert out.count("done after 2.0 of 2 epochs") == 2


@pytest.mark.parametrize("how", ["raise KeyError('labels')", "sys.exit(3)"])
def test_a_script_that_fails_after_training_began_leaves_nothing_running(train: Train, how: str) -> None:
    with pytest.raises((RoostError, SystemExit)) as caught:
        train(f"roost.train(job)\n{how}", samples=200, epochs=1000)
    error = caught.value
    if isinstance(error, SystemExit):
        assert error.code == 3
    else:
        assert "[R102]" in str(error)
        assert "raised KeyError: 'labels'" in str(error)
    assert running() == []


def test_a_script_that_fails_before_training_starts_nothing(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RoostError, match="raised ZeroDivisionError"):
        train("1 / 0\nroost.train(job)")
    assert running() == []
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_fails_fails_the_command_with_its_own_code(train: Train) -> None:
    with pytest.raises(RoostError, match="loss of micro-batch") as caught:
        train("data[0][-1] = float('nan')\nroost.train(job)")
    assert caught.value.code == "R601"
    assert running() == []


@pytest.mark.parametrize("where", ["in the script", "in wait", "after the script"])
def test_ctrl_c_stops_the_run_with_a_checkpoint_and_the_command_ends_well(train: Train, tmp_path: Path, where: str) -> None:
    # The signal comes from another thread, as a terminal's would, once training goes on.
    interrupt = """
        import threading

        def interrupt_once_training(run):
            while run.metrics().samples == 0:
                threading.Event().wait(0.01)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        run = roost.train(job)
        threading.Thread(target=interrupt_once_training, args=(run,)).start()
    """
    ends = {"in the script": "while True: threading.Event().wait(0.1)", "in wait": "print(run.wait().stopped)", "after the script": ""}
    out = train(textwrap.dedent(interrupt) + ends[where], samples=200, epochs=1000)
    assert "stopped after" in out
    assert ("True" in out) == (where == "in wait")
    (checkpoint,) = saved(tmp_path)[-1:]
    assert f"{checkpoint}/model.safetensors" in out
    assert running() == []


def test_a_second_ctrl_c_gives_up_a_run_that_cannot_finish(train: Train) -> None:
    # The data never comes, so that the pipeline never drains.
    lines = """
        import threading

        released = threading.Event()

        class Stuck:
            def __len__(self):
                return 16

            def __getitem__(self, index):
                if threading.current_thread().name.startswith("roost-data"):
                    released.wait(60)
                return data[0][index], data[1][index]

        def interrupt_twice(run):
            main = threading.main_thread().ident
            while run.metrics().state != "training":
                threading.Event().wait(0.01)
            signal.pthread_kill(main, signal.SIGINT)
            while not run.stopped:
                threading.Event().wait(0.01)
            if not run.ended:
                signal.pthread_kill(main, signal.SIGINT)
            released.set()

        import dataclasses
        run = roost.train(dataclasses.replace(job, data=Stuck()))
        threading.Thread(target=interrupt_twice, args=(run,)).start()
        run.wait()
    """
    with pytest.raises(KeyboardInterrupt):
        train(lines)
    assert running() == []


def test_ctrl_c_before_training_ends_the_script_as_usual(train: Train) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("signal.raise_signal(signal.SIGINT)\nroost.train(job)")


def test_sigterm_means_ctrl_c_while_a_script_runs() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
