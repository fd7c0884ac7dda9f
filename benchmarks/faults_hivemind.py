"""One peer of hivemind's averager for `python -m benchmarks.faults --hivemind PYTHON`; needs hivemind and nothing of Roost.

Arguments: own number, number of peers, bytes to average, and a peer to dial (empty for the first one, which prints its address). Averages
again and again; prints a JSON line when an all-reduce begins and when it has ended, with a checksum of the values.
"""

from __future__ import annotations

import json
import sys
import time
import zlib

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage

MATCHMAKING_S = 2.0
DEADLINE_S = 200.0
POLL_S = 0.005
PAUSE_S = 0.5


def main() -> None:
    """Average until killed."""
    index, peers, nbytes, first = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[first] if first else None, start=True)
    if not first:
        print(json.dumps({"address": str(dht.get_visible_maddrs()[0])}), flush=True)
    averager = DecentralizedAverager(
        [torch.full((nbytes // 4,), float(index))],
        dht=dht,
        prefix="faults",
        target_group_size=peers,
        min_group_size=2,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=1.0,
        declare_state_period=1e6,
        start=True,
    )
    while True:
        control = averager.step(wait=False, timeout=DEADLINE_S, allow_retries=True)
        while not control.done() and control.stage is not AveragingStage.RUNNING_ALLREDUCE:
            time.sleep(POLL_S)
        print(json.dumps({"event": "begun", "at": time.time()}), flush=True)
        error = control.exception(DEADLINE_S)
        with averager.get_tensors() as tensors:
            digest = zlib.crc32(tensors[0].numpy().tobytes())
            tensors[0].add_(float(index + 1))
        event = "applied" if error is None else "failed"
        print(json.dumps({"event": event, "at": time.time(), "digest": digest, "error": repr(error)[:200]}), flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
