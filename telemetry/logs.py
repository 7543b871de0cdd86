"""Where log records of our packages go: to stderr, one line each, whatever else the process logs."""

import logging
import sys

PACKAGES = ("deployments", "cluster", "engine", "kv_store", "messages", "telemetry")
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send what our packages log at `level` and above to stderr; for a process's owner alone, a second call is none."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(level)
        if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
            continue
        handler = _StderrHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for type checkers
    """Our own, so that it can be found again."""
