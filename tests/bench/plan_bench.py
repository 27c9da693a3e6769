"""How long 1,000 hosts take to plan: `PYTHONPATH=src python tests/bench/plan_bench.py`. A benchmark, not a test.

Prints CPU seconds of one process: planning, and planning with the JSON document and its hash. Target: 1 s.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.plan.tiny import tiny_lock

from specrig.plan import plan_host, plan_hosts
from specrig.plan.catalog import profiles

HOSTS = 1000


def main() -> int:
    """Plan HOSTS hosts of all profiles, each with an override, three times."""
    names = sorted(profiles())
    fleet = {
        f"rig{n:04}": {
            "rig_profile": (profile := names[n % len(names)]),
            "rig_services": [{"name": profiles()[profile].services[0]["name"], "port": 8000 + n % 100}],
        }
        for n in range(HOSTS)
    }
    plan_host("warm", {"rig_profile": "cpu_demo"})  # reads the catalog
    for _ in range(3):
        start = time.process_time()
        plans = plan_hosts(fleet, tiny_lock())
        planned = time.process_time()
        for plan in plans.values():
            plan.as_json()
        done = time.process_time()
        ok = sum(plan.ok for plan in plans.values())
        print(f"{HOSTS} hosts, {ok} ok: plan {planned - start:.2f} s, with JSON and hash {done - start:.2f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
