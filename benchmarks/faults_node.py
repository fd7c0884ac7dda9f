"""A node of `python -m benchmarks.faults`: the agent of `roost join`, which also logs when a round begins and what it applies."""

from __future__ import annotations

import logging
import zlib
from typing import Any

from torch import Tensor

from roost.agent import stage_rings
from roost.agent.ring_driver import Apply, RingDriver, Snapshot
from roost.cli.main import main
from roost.pipeline.tensor_bytes import to_buffer
from roost.types import SegmentPlan

logger = logging.getLogger(__name__)


class LoggingRing(RingDriver):
    """A ring whose rounds can be followed in the log: `round_begun`, and `average_applied` with a checksum of the mean."""

    def __init__(self, *, segment: SegmentPlan, snapshot: Snapshot, apply: Apply, generation: int, **rest: Any) -> None:
        async def copied() -> tuple[dict[str, Tensor], int]:
            logger.info("round_begun generation=%d segment=%d", generation, segment.index)
            return await snapshot()

        async def applied(average: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
            digest = 0
            for name in sorted(average):
                digest = zlib.crc32(to_buffer(average[name].contiguous()), digest)
            await apply(average, copies)
            logger.info("average_applied generation=%d segment=%d digest=%08x", generation, segment.index, digest)

        super().__init__(segment=segment, snapshot=copied, apply=applied, generation=generation, **rest)


if __name__ == "__main__":
    stage_rings.RingDriver = LoggingRing  # type: ignore[misc]
    main()
