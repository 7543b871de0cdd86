import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROCESS = """
import gc, sys
from deployments.worker.garbage import set_loaded_objects_aside

loaded = [[] for _ in range(400_000)]
gc.collect()
if sys.argv[1] == "aside":
    set_loaded_objects_aside()
before = gc.get_stats()[2]["collections"]
held = []
for _ in range(1_000):
    # Cycles that outlive the collections of the young, as those of a request do.
    for _ in range(100):
        cycle = []
        cycle.append(cycle)
        held.append(cycle)
    del held[:-2_000]
print(gc.get_stats()[2]["collections"] - before)
"""


def full_collections(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROCESS, mode], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_cycles_are_found_soon_in_a_process_that_has_loaded_much() -> None:
    assert full_collections("as it is") == 0
    assert full_collections("aside") >= 1
