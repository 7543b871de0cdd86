"""Starts `benchmarks.engine_speed`; `--help` says what it measures.

A file of its own because Python puts a script's folder first on its path, where this file hides the package `engine`.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # As workers run; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.engine_speed import main

    sys.exit(main())
