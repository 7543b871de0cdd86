"""A private Ray on this machine with Serve on top: up, one application deployed, down.

Only what replicas need is started: no dashboard, no Serve proxy. The cluster asks every caller for a token that is
made here and written nowhere.
"""

import contextlib
import io
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import ray
from ray import serve
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, its stub lacks them
from ray.serve import Application

from deployments.app import APP_NAME

_OBJECT_STORE_BYTES = 128 * 1024**2
"""KV does not go through the object store; Ray refuses less than 75 MB."""
_FIRST_FAILURE = ("failed to start", "failed its health check")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION_LINE = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*)(?:: (.*)|\(\))?$")


class LocalRay:
    """Ray and Serve, up inside `with`; every process is gone or going when it ends.

    Args:
        folder: Ray's sockets and logs; a short path, because a socket's path has 107 bytes.
        num_cpus: CPUs that Ray may book, whatever the machine has.
        environment: Variables for every process of the cluster.
        stop_timeout_s: A stop that takes longer is given up; the caller then ends the processes.
        is_verbose: Send the output of replicas to this process's.
    """

    def __init__(
        self, folder: Path, *, num_cpus: int, environment: dict[str, str], stop_timeout_s: float, is_verbose: bool
    ) -> None:
        self._folder = folder
        self._num_cpus = num_cpus
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._is_verbose = is_verbose
        self._servers: list[psutil.Process] = []

    def __enter__(self) -> Self:
        with self._quiet(), _exported(self._environment):
            _use_private_token()
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=self._num_cpus,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=self._is_verbose,
                    logging_level=logging.INFO if self._is_verbose else logging.ERROR,
                    _temp_dir=str(self._folder),
                )
                if not self._is_verbose:
                    logging.getLogger("ray.serve").setLevel(logging.ERROR)
                serve.start(proxy_location="Disabled")
            except BaseException:
                self._stop()
                raise
        self._servers = [child for child in psutil.Process().children() if child.name() in ("raylet", "gcs_server")]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def deploy(self, application: Application) -> None:
        """Hand `application` to Serve; returns before its replicas are up."""
        with self._quiet():
            serve.run_many(
                [serve.RunTarget(application, name=APP_NAME, route_prefix=None)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )

    def start_failure(self) -> str | None:
        """Why a replica did not start, in one line; None while nothing has failed."""
        with self._quiet():
            application = serve.status().applications.get(APP_NAME)
        for name, deployment in (application.deployments if application else {}).items():
            if any(sign in deployment.message for sign in _FIRST_FAILURE):
                return f"{name} did not start: {reason_in(deployment.message)}"
        return None

    def is_alive(self) -> bool:
        """Whether Ray's own processes run; without them nobody would replace a dead worker."""
        return all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._servers)

    def _stop(self) -> None:
        with self._quiet():
            if ray.is_initialized() and self.is_alive():
                _bounded(serve.shutdown, self._stop_timeout_s)
            _bounded(ray.shutdown, self._stop_timeout_s)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        if self._is_verbose:
            yield
            return
        # Ray prints notices about its own actors to whatever sys.stdout and sys.stderr are at the time.
        sink = io.StringIO()
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield


def reason_in(message: str) -> str:
    """The last exception of a Serve status message as one line, our own errors without their class."""
    lines = [line.strip() for line in _ANSI.sub("", message).splitlines() if line.strip()]
    for line in reversed(lines):
        match = _EXCEPTION_LINE.match(line)
        if match is None:
            continue
        if match[1] == "ActorDiedError":
            return "its process died; look for too little memory or a crash with --verbose"
        is_own = line.startswith("messages.errors.")
        return match[2] if is_own and match[2] else f"{match[1]}: {match[2] or 'no message'}"
    return lines[-1] if lines else "no reason was given"


def _use_private_token() -> None:
    """Turn token authentication on for this process and the clusters it starts.

    Ray 2.60 would otherwise put a token into the home folder. The token stays for the life of the process, because
    Ray's threads keep using it after a shutdown.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray reads both once, when it is imported.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _exported(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _bounded(call: Callable[[], object], timeout_s: float) -> None:
    """Run `call` for at most `timeout_s`: Ray's calls wait for ever when a part of the cluster is gone."""
    thread = threading.Thread(target=_ignore_ray_errors, args=(call,), daemon=True)
    thread.start()
    thread.join(timeout_s)


def _ignore_ray_errors(call: Callable[[], object]) -> None:
    # The cluster may be half dead; what is left of it is ended by process id afterwards.
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError, OSError):
        call()
