"""Times one plan from a cold start: `python -m benchmarks.planning_timing MODEL NODES SEED` prints JSON.

`excluded_s` and `excluded_cpu_s` are what making the random pool took: everything else of the process counts.
"""

from __future__ import annotations

import json
import random
import sys
import time

from benchmarks.planning_pools import make_scenario
from benchmarks.planning_profiles import load_profile
from roost.planning.planner import make_plan


def main() -> None:
    """Plan for one pool."""
    name, nodes, seed = sys.argv[1:]
    profile = load_profile(name)
    wall, cpu = time.perf_counter(), time.process_time()
    scenario = make_scenario(profile, int(nodes), int(seed))
    excluded, excluded_cpu = time.perf_counter() - wall, time.process_time() - cpu
    plan = make_plan(profile, scenario.nodes, scenario.links, scenario.config, random.Random(0), options=scenario.options)
    figures = {
        "excluded_s": excluded,
        "excluded_cpu_s": excluded_cpu,
        "clusters": len(plan.clusters),
        "samples_per_s": plan.samples_per_s,
        "torch": "torch" in sys.modules,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
