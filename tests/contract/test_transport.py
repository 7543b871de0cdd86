import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import BlockTransport
from tests.contract.transport_scenarios import SCENARIOS, SIZE, Owner, pattern

ROOT = Path(__file__).parents[2]
MAX_IDLE_SHARE = 0.05


class LoopbackOwner:
    def __init__(self, network: LoopbackNetwork, name: str) -> None:
        self.agent_name = name
        self._network = network
        self._buffer = torch.zeros(SIZE, dtype=torch.uint8)
        self.metadata = LoopbackTransport(name, self._buffer, network).metadata()

    async def fill(self, seed: int) -> None:
        self._buffer.copy_(pattern(seed))

    async def stop(self) -> None:
        self._network.stop(self.agent_name)

    async def resume(self) -> None:
        self._network.resume(self.agent_name)

    async def kill(self) -> None:
        self._network.kill(self.agent_name)


class LoopbackWorld:
    num_restarts = 20
    maps_its_owners = False

    def __init__(self) -> None:
        self._network = LoopbackNetwork()
        self._names = (f"owner-{number}" for number in count())
        self.local = torch.zeros(SIZE, dtype=torch.uint8)
        self.reader: BlockTransport = LoopbackTransport("reader", self.local, self._network, connect_timeout_s=0.2)
        self.owner: Owner = LoopbackOwner(self._network, next(self._names))

    async def start_owner(self) -> LoopbackOwner:
        return LoopbackOwner(self._network, next(self._names))


@pytest.mark.parametrize("name", SCENARIOS)
async def test_loopback_keeps_the_promise(name: str) -> None:
    await SCENARIOS[name](LoopbackWorld())


def run_reader(tmp: Path, transports: str) -> dict[str, str | float]:
    results = tmp / "results.json"
    ucx = "all" if transports == "same_host" else transports
    environment = {**os.environ, "UCX_TLS": ucx, "UCX_LOG_LEVEL": "fatal", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.contract.transport_process", "reader", str(results), transports],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=150,
    )
    loaded: dict[str, str | float] = json.loads(results.read_text())
    return loaded


@pytest.fixture(scope="module", params=["all", "tcp", "same_host"])
def nixl_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | float]:
    return run_reader(tmp_path_factory.mktemp("nixl"), request.param)


@pytest.mark.nixl
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nixl_between_processes_keeps_the_promise(nixl_results: dict[str, str | float], name: str) -> None:
    assert nixl_results[name] == ""


@pytest.mark.nixl
@pytest.mark.timeout(200)
@pytest.mark.parametrize("side", ["idle_reader", "idle_owner"])
def test_an_idle_agent_uses_under_five_percent_of_a_core(nixl_results: dict[str, str | float], side: str) -> None:
    share = nixl_results[side]

    assert isinstance(share, float)
    assert share < MAX_IDLE_SHARE
