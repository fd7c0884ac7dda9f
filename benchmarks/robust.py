"""What one lying cluster of five does to a run, with and without robust averaging: `python -m benchmarks.robust`.

Five replicas of the digits CNN train side by side and average after every few updates with the rings of the agent (RingDriver, over
the in-process transport): all honest, or with one whose transport flips the sign of everything that it averages; plainly, or
with `robust_averaging`. All runs of a seed begin with the same weights and see the same samples in the same order; they are
interleaved. In pools called "even" every cluster takes as many updates between two rounds, in "uneven" ones 1 to 8, and the liar 2.

`loss_over_honest`: the mean of the honest clusters' validation losses at the end, over that of the plain mean among honest clusters
with the same seed and pool; median, least and largest over the seeds. `accuracy`: the mean of the honest clusters. A run whose averages
are refused, or that ends with numbers that are not finite, has neither (null). `--quick` is a check that all of it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from roost import messages as m
from roost.agent.ring_driver import RingDriver
from roost.averaging.segment_average import AveragingOptions
from roost.config import RobustMethod
from roost.demo.digits import DigitsCNN, accuracy, load_digits
from roost.errors import DeadlineError, NonFiniteLossError
from roost.transport.inproc import InprocNetwork, InprocTransport
from roost.transport.interface import Buffer, Sender
from roost.types import Peer, Role, SegmentPlan

CLUSTERS = 5
LIAR = 2
POOLS = {"even": (3, 3, 3, 3, 3), "uneven": (1, 2, 2, 4, 8)}
"""Updates of each cluster between two rounds."""
SEEDS = (1, 2)
ROUNDS = 40
BATCH, RATE = 16, 3e-3
RUN_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to average, with or without a liar."""

    robust: RobustMethod
    lies: bool

    @property
    def name(self) -> str:
        """As in the result."""
        return f"{'one liar' if self.lies else 'honest'}, {self.robust.value}"


ARMS = tuple(Arm(robust=robust, lies=lies) for lies in (False, True) for robust in RobustMethod)


class FlippingTransport(InprocTransport):
    """Flips the sign of everything that is averaged, if it shall."""

    flips = False

    async def send(self, peer: Peer, message: m.Message, buffers: Sequence[Buffer] = (), **options: Any) -> None:
        """Send a message, changed or not."""
        if self.flips and isinstance(message, m.RingChunk):
            values = torch.frombuffer(bytearray(buffers[0]), dtype=torch.float32)
            buffers = [values.neg().view(torch.uint8).numpy().data]
        await super().send(peer, message, buffers, **options)


class Replica:
    """One cluster of one node: a model, what it has trained on, and its ring."""

    def __init__(self, seed: int, index: int, updates: int) -> None:
        torch.manual_seed(seed)
        self._model = DigitsCNN().train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE)
        self._order = torch.Generator().manual_seed(100 * seed + index)
        self._updates = updates
        self._samples = 0
        self.driver: RingDriver | None = None

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The tensors that are averaged, by name."""
        return {name: tensor for name, tensor in self._model.state_dict().items() if tensor.is_floating_point()}

    def train(self, images: Tensor, labels: Tensor) -> None:
        """Take the updates until the next round."""
        for _ in range(self._updates):
            picked = torch.randint(len(labels), (BATCH,), generator=self._order)
            self._optimizer.zero_grad()
            functional.cross_entropy(self._model(images[picked]), labels[picked]).backward()
            self._optimizer.step()
            self._samples += BATCH

    def evaluate(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the validation loss and accuracy."""
        self._model.eval()
        with torch.no_grad():
            logits = self._model(images)
            return float(functional.cross_entropy(logits, labels)), float(accuracy(logits, labels))

    async def snapshot(self) -> tuple[dict[str, Tensor], int]:
        """Return copies of what is averaged, and the samples behind it."""
        return {name: tensor.clone() for name, tensor in self.averaged.items()}, self._samples

    async def apply(self, average: dict[str, Tensor], snapshot: dict[str, Tensor]) -> None:
        """Take an average; nothing has been learnt since the snapshot."""
        for name, tensor in self.averaged.items():
            tensor.copy_(average[name])

    async def on_message(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> None:
        """Hand a message to the ring."""
        assert self.driver is not None
        if isinstance(message, m.OpenRound):
            self.driver.opened(sender.peer_id, message)
        elif isinstance(message, m.RingChunk):
            self.driver.chunk_arrived(sender.peer_id, message, buffers[0])

    async def on_call(self, sender: Sender, message: m.Message, buffers: Sequence[Buffer]) -> tuple[m.Message, Sequence[Buffer]]:
        """Nothing calls."""
        return m.Done(), []


async def trained(arm: Arm, updates: Sequence[int], seed: int, rounds: int) -> tuple[float, float] | None:
    """Return the mean validation loss and accuracy of the honest clusters, or None if there are none."""
    (images, labels), validation = load_digits()
    names = tuple(f"cluster-{index}" for index in range(CLUSTERS))
    replicas = [Replica(seed, index, count) for index, count in enumerate(updates)]
    network = InprocNetwork()
    transports = [FlippingTransport(name, Role.NODE, network) for name in names]
    transports[LIAR].flips = arm.lies
    for transport, replica in zip(transports, replicas, strict=True):
        await transport.start(replica)
    peers = {name: Peer(peer_id=name, address=transport.address) for name, transport in zip(names, transports, strict=True)}
    averaged = replicas[0].averaged
    segment = SegmentPlan(index=0, tensors=tuple(averaged), nbytes=sum(tensor.nbytes for tensor in averaged.values()), members=names)
    tasks: list[asyncio.Task[None]] = []
    for name, transport, replica in zip(names, transports, replicas, strict=True):
        replica.driver = RingDriver(
            job_id="robust",
            segment=segment,
            node_id=name,
            peers=peers,
            transport=transport,
            snapshot=replica.snapshot,
            apply=replica.apply,
            options=AveragingOptions(robust=arm.robust),
            shares=dict(zip(names, map(float, updates), strict=True)),
        )
        tasks.append(asyncio.create_task(replica.driver.run()))
        await replica.driver.ready.wait()
    try:
        return await asyncio.wait_for(_rounds(replicas, (images, labels), validation, tasks, rounds), RUN_DEADLINE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(transport.stop() for transport in transports), return_exceptions=True)


async def _rounds(
    replicas: Sequence[Replica], training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], tasks: Sequence[Any], rounds: int
) -> tuple[float, float] | None:
    for number in range(1, rounds + 1):
        for replica in replicas:
            replica.train(*training)
        averaging = asyncio.gather(*(replica.driver.average_exactly(number) for replica in replicas if replica.driver is not None))
        await asyncio.wait([averaging, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not averaging.done():
            # A ring has ended: weights that are to be averaged are not finite any more.
            averaging.cancel()
            await asyncio.gather(averaging, return_exceptions=True)
            return None
        try:
            averaging.result()
        except (DeadlineError, NonFiniteLossError):
            return None
    found = [replica.evaluate(*validation) for index, replica in enumerate(replicas) if index != LIAR]
    loss, right = (statistics.fmean(figures) for figures in zip(*found, strict=True))
    return (loss, right) if math.isfinite(loss) else None


Found = Sequence[tuple[float, float] | None]
"""Losses and accuracies, by seed."""


def summary(found: Found, honest: Found) -> dict[str, Any]:
    """Return the losses and accuracies of an arm, and how its losses compare with the plain mean among honest clusters."""
    ratios = [each[0] / base[0] for each, base in zip(found, honest, strict=True) if each is not None and base is not None]
    figures: dict[str, Any] = {
        "losses": [None if each is None else round(each[0], 4) for each in found],
        "accuracy": [None if each is None else round(each[1], 4) for each in found],
    }
    if len(ratios) == len(found):
        figures |= {
            "loss_over_honest": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
        }
    return figures


def main() -> None:
    """Train every arm in both pools, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds of one seed")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    # Rings name the liar in every round.
    logging.disable(logging.WARNING)
    seeds, rounds = (SEEDS[:1], 3) if quick else (SEEDS, ROUNDS)
    result: dict[str, Any] = {"clusters": CLUSTERS, "rounds": rounds, "seeds": len(seeds), "batch_size": BATCH}
    for pool, updates in POOLS.items():
        runs: dict[Arm, list[tuple[float, float] | None]] = {arm: [] for arm in ARMS}
        for seed in seeds:
            for arm in ARMS:
                runs[arm].append(asyncio.run(trained(arm, updates, seed, rounds)))
        honest = runs[ARMS[0]]
        result[pool] = {"updates_per_round": list(updates)} | {arm.name: summary(found, honest) for arm, found in runs.items()}
        for arm, found in runs.items():
            print(pool, arm.name, summary(found, honest), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
