"""Limits of a whole process, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest


def in_a_process(code: str, **environment: str) -> dict[str, object]:
    """Return the JSON that `code` prints, run in a fresh interpreter."""
    lines = textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120, check=False, env={**environment})
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_torch_computes_with_the_owners_threads_and_helpers_with_one_whatever_the_environment_says() -> None:
    code = """
        import asyncio, json, threading, torch
        from roost.agent.compute import ComputeThread
        from roost.agent.limits import HELPERS, limit_threads
        from roost.pipeline.probe import measure

        async def scene():
            limit_threads(2)
            compute = ComputeThread(threads=2, relative_speed=1.0)
            compute.start()
            await asyncio.to_thread(measure, threads=2, budget_s=0.01)
            gate = threading.Barrier(HELPERS + 1)
            helpers = [asyncio.to_thread(lambda: (gate.wait(60), torch.get_num_threads())[1]) for _ in range(HELPERS)]
            tasks = [asyncio.create_task(helper) for helper in helpers]
            compute_threads = await compute.run(torch.get_num_threads)
            compute_threads = max(compute_threads, await compute.run(lambda: (gate.wait(60), torch.get_num_threads())[1]))
            each = [await task for task in tasks]
            more = asyncio.get_running_loop()._default_executor._max_workers
            compute.stop()
            return {"compute": compute_threads, "helpers": each, "most": more, "interop": torch.get_num_interop_threads()}

        print(json.dumps(asyncio.run(scene())))
    """
    found = in_a_process(code, OMP_NUM_THREADS="4", PATH="")
    assert found == {"compute": 2, "helpers": [1, 1], "most": 2, "interop": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_beyond_the_memory_lent_the_system_gives_nothing_and_the_process_lives_on() -> None:
    code = """
        import json, torch
        from roost.agent.limits import STACK_BYTES, THREADS_BESIDE, limit_memory

        lent = 200 << 20
        limit_memory(lent, "cpu", 1)
        within = torch.ones(lent // 2, dtype=torch.uint8)
        try:
            torch.ones(lent + STACK_BYTES * (THREADS_BESIDE + 1), dtype=torch.uint8)
            refused = False
        except RuntimeError:
            refused = True
        print(json.dumps({"refused": refused, "within": int(within[-1])}))
    """
    assert in_a_process(code, OMP_NUM_THREADS="1", PATH="") == {"refused": True, "within": 1}
