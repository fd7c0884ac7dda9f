"""One peer of hivemind's averager for `python -m benchmarks.averaging --hivemind PYTHON`; needs hivemind and nothing of Roost.

Arguments: own address, number of peers, bytes to average, repetitions, and a peer to dial (empty for the first one). Prints a JSON line
with its address, if it is the first, then one with the seconds of each all-reduce (matchmaking, which hivemind needs before, left out).
"""

from __future__ import annotations

import json
import sys
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage

MATCHMAKING_S = 4.0
DEADLINE_S = 200.0
POLL_S = 0.005


def main() -> None:
    """Average and print."""
    address, peers, nbytes, repetitions, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=[first] if first else None, start=True)
    if not first:
        print(json.dumps({"address": str(dht.get_visible_maddrs()[0])}), flush=True)
    averager = DecentralizedAverager(
        [torch.zeros(nbytes // 4)],
        dht=dht,
        prefix=f"averaging{nbytes}",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=2.0,
        declare_state_period=1e6,
        start=True,
    )
    seconds = []
    while len(seconds) < repetitions:
        control = averager.step(wait=False, timeout=DEADLINE_S, allow_retries=True)
        while not control.done() and control.stage is not AveragingStage.RUNNING_ALLREDUCE:
            time.sleep(POLL_S)
        began = time.perf_counter()
        control.result(DEADLINE_S)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}), flush=True)
    sys.stdin.readline()
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
