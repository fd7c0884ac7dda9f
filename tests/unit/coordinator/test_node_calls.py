from __future__ import annotations

import asyncio

import pytest

from roost.coordinator.node_calls import together
from roost.errors import NodeLostError


def test_the_first_failure_ends_the_other_calls_and_is_raised_as_itself() -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise NodeLostError("node a is lost", node="a")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("b")

    with pytest.raises(NodeLostError, match="node a is lost"):
        asyncio.run(together([waits(), fails()]))
    assert ended == ["b"]


def test_a_task_that_is_cancelled_while_its_calls_fail_ends_as_cancelled() -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def fails_when_cancelled() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise NodeLostError("node a is lost", node="a") from None

        task = asyncio.create_task(together([fails_when_cancelled()]))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
