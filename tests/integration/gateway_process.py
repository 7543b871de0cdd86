"""A gateway in a process of its own, as in production but without Ray.

    python -m tests.integration.gateway_process CONFIG.json GRPC_PORT HTTP_PORT

It says `ready` on stdout, drains on SIGTERM, and dies with its parent.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from deployments.config import AppConfig, parse_config
from deployments.gateway.gateway import GatewayRuntime
from telemetry.logs import log_to_stderr
from tests.child_process import die_with_parent, say


async def run(config: AppConfig) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with GatewayRuntime(config):
        say("ready")
        await stopped.wait()


if __name__ == "__main__":
    die_with_parent()
    log_to_stderr()
    file, grpc_port, http_port = sys.argv[1:]
    data = json.loads(Path(file).read_text())
    data["gateway"] |= {"grpc_port": int(grpc_port), "http_port": int(http_port)}
    asyncio.run(run(parse_config(data)))
