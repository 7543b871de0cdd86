"""Our packages log to stderr, once, and nobody else's level changes."""

import subprocess
import sys

SCRIPT = """
import logging
from telemetry.logs import log_to_stderr
log_to_stderr()
log_to_stderr()
logging.getLogger("engine.loop").info("model.loaded blocks=%d", 3)
logging.getLogger("engine.loop").debug("hidden")
logging.getLogger("other").info("hidden")
"""


def test_a_record_of_ours_is_one_line_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)

    assert done.stdout == ""
    assert done.stderr.endswith("INFO engine.loop model.loaded blocks=3\n")
    assert done.stderr.count("\n") == 1
