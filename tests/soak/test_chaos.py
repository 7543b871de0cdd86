"""One process after another is killed under load, and no request is lost: the promise of the whole system.

Clients talk to two gateways in processes of their own, through the SDK. Workers and registry shards may die without a
client hearing of it; when its gateway dies, the SDK says so, and the same request through the other one is right.
"""

import asyncio
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deployments.preflight import free_ports
from kvferry import AsyncClient, KVFerryError
from tests.integration.process_group import ProcessGroup, Reference, make_prompt, save_model_with_tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.nixl]

WORKERS = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
GATEWAYS = ("g1", "g2")
SHARDS = (0, 1)
NUM_CLIENTS = 8
NUM_PROMPTS = 40
TIMEOUT_S = 30.0
RECONNECT_S = 5.0
CALM_S = 2.0
"""Load without kills, before the first and after the last."""
MAX_NEW = 40


@dataclass(slots=True)
class GatewayProcess:
    """One gateway on its ports, in its present life."""

    name: str
    grpc_port: int
    http_port: int
    process: asyncio.subprocess.Process | None = None
    away_s: list[tuple[float, float]] = field(default_factory=list)
    """From each kill to when it served again."""

    def was_away(self, first_s: float, last_s: float) -> bool:
        """Whether it was dead at any time between the two."""
        return any(killed_s <= last_s and first_s <= back_s for killed_s, back_s in self.away_s)

    async def start(self, config_file: Path, log: Path) -> None:
        arguments = [str(config_file), str(self.grpc_port), str(self.http_port)]
        with log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.integration.gateway_process", *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
                cwd=Path(__file__).parents[2],
            )
        assert self.process.stdout is not None
        answer = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert answer == b"ready\n", f"it has not started; see {log}"

    async def kill(self) -> None:
        assert self.process is not None
        self.away_s.append((time.monotonic(), math.inf))
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass(slots=True)
class Answered:
    """One request that ended right."""

    sent_s: float
    took_s: float
    was_retried: bool
    num_replays: int


@dataclass
class Chaos:
    """The load, the kills, and the one who keeps count."""

    group: ProcessGroup
    gateways: list[GatewayProcess]
    scratch: Path
    reference: Reference
    random: random.Random
    num_requests: int
    rounds: int
    answered: list[Answered] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind, when, and seconds until the victim was ready again."""
    is_calm_again: bool = False

    async def run(self) -> None:
        clients = [self.be_client(number) for number in range(NUM_CLIENTS)]
        await asyncio.gather(*clients, self.kill_in_turn())

    async def kill_in_turn(self) -> None:
        await asyncio.sleep(CALM_S)
        workers = {
            role: itertools.cycle([n for n, r in WORKERS.items() if r == role]) for role in ("prefill", "decode")
        }
        gateways, shards = itertools.cycle(self.gateways), itertools.cycle(SHARDS)
        for _ in range(self.rounds):
            for role, names in workers.items():
                await self.kill_worker(role, next(names))
            await self.kill_gateway(next(gateways))
            await self.kill_shard(next(shards))
        await asyncio.sleep(CALM_S)
        self.is_calm_again = True

    async def kill_worker(self, role: str, name: str) -> None:
        at_s = time.monotonic()
        await self.group.workers[name].kill()
        await self.group.start(name)
        await self.group.until_live(*WORKERS)
        self.kills.append((role, at_s, time.monotonic() - at_s))

    async def kill_gateway(self, gateway: GatewayProcess) -> None:
        at_s = time.monotonic()
        await gateway.kill()
        await self.start_gateway(gateway)
        self.kills.append(("gateway", at_s, time.monotonic() - at_s))

    async def start_gateway(self, gateway: GatewayProcess) -> None:
        await gateway.start(self.scratch / "config.json", self.scratch / f"{gateway.name}.log")
        async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}") as client:
            async with asyncio.timeout(60):
                while not await _is_serving(client):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.1)
        if gateway.away_s:
            # Channels that have failed to connect try again a moment later.
            gateway.away_s[-1] = (gateway.away_s[-1][0], time.monotonic() + RECONNECT_S)

    async def kill_shard(self, index: int) -> None:
        at_s = time.monotonic()
        await asyncio.to_thread(self.group.shards.kill_shard, index)
        await asyncio.to_thread(self.group.shards.restart_shard, index)
        self.kills.append(("shard", at_s, time.monotonic() - at_s))

    async def be_client(self, number: int) -> None:
        """Send requests one after another, half of the clients to each gateway."""
        mine, other = self.gateways[number % 2], self.gateways[1 - number % 2]
        async with (
            AsyncClient(f"127.0.0.1:{mine.grpc_port}", timeout_s=TIMEOUT_S) as client,
            AsyncClient(f"127.0.0.1:{other.grpc_port}", timeout_s=TIMEOUT_S) as spare,
        ):
            while not (self.is_calm_again and len(self.answered) + len(self.wrong) >= self.num_requests):
                await self.send_one(client, spare, mine)

    async def send_one(self, client: AsyncClient, spare: AsyncClient, gateway: GatewayProcess) -> None:
        seed = self.random.randrange(NUM_PROMPTS)
        sent_s, was_retried = time.monotonic(), False
        try:
            try:
                tokens, num_replays = await ask(client, seed)
            except KVFerryError as error:
                # Only the death of the gateway itself may be seen, and must be.
                if not error.retryable or not gateway.was_away(sent_s, time.monotonic()):
                    raise
                was_retried = True
                tokens, num_replays = await ask(spare, seed)
        except KVFerryError as error:
            self.wrong.append(f"prompt {seed}: {error!r} of {gateway.name}")
            return
        if tokens != self.reference(prompt_of(seed), length_of(seed)):
            self.wrong.append(f"prompt {seed}: {tokens}")
        self.answered.append(Answered(sent_s, time.monotonic() - sent_s, was_retried, num_replays))

    def report(self) -> str:
        """Latency before the first kill, between, and after the last recovery; and how long each recovery took."""
        first_s, last_s = self.kills[0][1], self.kills[-1][1] + self.kills[-1][2]
        parts = {
            "before": [one.took_s for one in self.answered if one.sent_s + one.took_s < first_s],
            "between": [one.took_s for one in self.answered if first_s <= one.sent_s < last_s],
            "after": [one.took_s for one in self.answered if one.sent_s >= last_s],
        }
        lines = [
            f"{name}: {len(took)} requests, median {statistics.median(took):.3f} s, worst {max(took):.3f} s"
            for name, took in parts.items()
            if took
        ]
        for kind in dict.fromkeys(kind for kind, _, _ in self.kills):
            took = [seconds for each, _, seconds in self.kills if each == kind]
            lines.append(f"{kind}: killed {len(took)} times, ready again after {statistics.median(took):.1f} s")
        retried = sum(one.was_retried for one in self.answered)
        lines.append(f"replayed {sum(one.num_replays > 0 for one in self.answered)}, retried by the client {retried}")
        return "\n".join(lines)


async def ask(client: AsyncClient, seed: int) -> tuple[list[int], int]:
    answer = await client.generate(prompt_of(seed), max_tokens=length_of(seed), temperature=0, ignore_eos=True)
    return list(answer.token_ids), answer.provenance.num_replays


async def _is_serving(client: AsyncClient) -> bool:
    try:
        return bool(await client.models(timeout_s=2))
    except KVFerryError:
        return False


def prompt_of(seed: int) -> list[int]:
    """Prompts of very different lengths; every other one begins like the one before it."""
    own = make_prompt(1 + (seed * 37) % 150, seed)
    return make_prompt(64, 500 + seed // 2) + own if seed % 4 >= 2 else own


def length_of(seed: int) -> int:
    return 8 + seed % (MAX_NEW - 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def group(folder: Path, tmp_path: Path) -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup(folder, tmp_path, WORKERS, num_blocks=120) as group:
        yield group


@pytest.fixture
async def gateways() -> AsyncIterator[list[GatewayProcess]]:
    ports = free_ports(2 * len(GATEWAYS))
    started = [GatewayProcess(name, ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(GATEWAYS)]
    yield started
    for gateway in started:
        if gateway.process is not None and gateway.process.returncode is None:
            await gateway.kill()


@pytest.mark.parametrize(
    ("num_requests", "rounds"),
    [
        pytest.param(80, 1, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(800, 3, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_every_request_ends_with_its_own_tokens_whatever_is_killed(
    group: ProcessGroup,
    gateways: list[GatewayProcess],
    folder: Path,
    tmp_path: Path,
    num_requests: int,
    rounds: int,
) -> None:
    reference = Reference(folder)
    for seed in range(NUM_PROMPTS):
        reference(prompt_of(seed), length_of(seed))
    chaos = Chaos(group, gateways, tmp_path, reference, random.Random(3), num_requests, rounds)  # noqa: S311 - chaos
    for gateway in gateways:
        await chaos.start_gateway(gateway)

    await asyncio.wait_for(chaos.run(), 800)

    print("\n" + chaos.report())
    assert not chaos.wrong, chaos.wrong
    assert len(chaos.answered) >= num_requests
    assert Counter(kind for kind, _, _ in chaos.kills) == dict.fromkeys(
        ("prefill", "decode", "gateway", "shard"), rounds
    )
    await group.until_baseline()
