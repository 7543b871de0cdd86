"""Everything at once, for a long time: random requests and cancels while workers and shards are killed and stopped.

At the end nothing was wrong, nothing hung, nothing leaked: not a token, a block, a file in /dev/shm or memory.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kvferry import AsyncClient, KVFerryError
from tests.integration.process_group import ProcessGroup, Reference, make_prompt, save_model_with_tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.nixl]

WORKERS = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
WATCHED = ("p1", "d1")
"""Not killed after the first quarter, so that their memory can be followed in the last half."""
NUM_CLIENTS = 6
NUM_PROMPTS = 40
REQUEST_TIMEOUT_S = 30.0


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)
    memory_mb: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Storm:
    """The load, what breaks, and the one who keeps count."""

    group: ProcessGroup
    reference: Reference
    random: random.Random
    duration_s: float
    tally: Tally = field(default_factory=Tally)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return self.share > 1

    @property
    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        return (time.monotonic() - self.started_s) / self.duration_s

    async def send_requests(self) -> None:
        address = f"127.0.0.1:{self.group.config.gateway.grpc_port}"
        async with AsyncClient(address, timeout_s=REQUEST_TIMEOUT_S) as client:
            while not self.is_over:
                await self.send_one(client)

    async def send_one(self, client: AsyncClient) -> None:
        seed = self.random.randrange(NUM_PROMPTS)
        prompt, max_tokens = prompt_of(seed), 4 + seed % 20
        leaves_after = self.random.choice([1, 3, 8]) if self.random.random() < 0.2 else None
        tokens: list[int] = []
        outcome = "whole"
        async with client.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True) as chunks:
            try:
                async for chunk in chunks:
                    tokens.extend(chunk.token_ids)
                    if leaves_after is not None and len(tokens) >= leaves_after:
                        outcome = "left"
                        break
            except KVFerryError as error:
                outcome = f"retryable {type(error).__name__}" if error.retryable else f"fatal {error!r}"
        self.tally.outcomes[outcome] += 1
        golden = self.reference(prompt, max_tokens)
        if tokens != (golden if outcome == "whole" else golden[: len(tokens)]):
            self.tally.wrong.append(f"prompt {seed}, {outcome}: {tokens} instead of {golden}")
        if outcome.startswith("retryable"):
            await asyncio.sleep(0.2)

    async def break_things(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.random.uniform(1.0, 4.0))
            name, blow = self.random.choice(self.blows())
            self.tally.blows[name] += 1
            await blow()

    def blows(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        victim = self.random.choice([name for name in WORKERS if not (self.share > 0.25 and name in WATCHED)])
        sleeper, shard = self.random.choice(list(WORKERS)), self.random.randrange(2)
        return [
            (f"kill a {WORKERS[victim]} worker", lambda: self.kill(victim)),
            (f"stop a {WORKERS[sleeper]} worker", lambda: self.stop(sleeper)),
            ("kill a shard", lambda: self.kill_shard(shard)),
        ]

    async def kill(self, victim: str) -> None:
        await self.group.workers[victim].kill()
        await asyncio.sleep(self.random.uniform(0.0, 1.0))
        await self.group.start(victim)

    async def stop(self, victim: str) -> None:
        self.group.workers[victim].send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.2, 5.0))
        self.group.workers[victim].send_signal(signal.SIGCONT)

    async def kill_shard(self, index: int) -> None:
        await asyncio.to_thread(self.group.shards.kill_shard, index)
        await asyncio.sleep(self.random.uniform(0.2, 3.0))
        await asyncio.to_thread(self.group.shards.restart_shard, index)

    async def watch_memory(self) -> None:
        while not self.is_over:
            pids = {name: self.group.workers[name].process.pid for name in WATCHED} | {"gateway": os.getpid()}
            at_s = time.monotonic()
            for name, pid in pids.items():
                if self.share > 0.5 and psutil.pid_exists(pid):
                    used_mb = psutil.Process(pid).memory_info().rss / 2**20
                    self.tally.memory_mb.setdefault(name, []).append((at_s, used_mb))
            await asyncio.sleep(0.5)


def prompt_of(seed: int) -> list[int]:
    """Prompts of very different lengths; every other one begins like the one before it."""
    own = make_prompt(1 + (seed * 37) % 220, seed)
    return make_prompt(64, 500 + seed // 2) + own if seed % 4 >= 2 else own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def group(folder: Path, tmp_path: Path) -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup(folder, tmp_path, WORKERS, num_blocks=80) as group:
        yield group


@pytest.mark.parametrize(
    ("duration_s", "most_growth_mb_per_minute"),
    [
        # In its first minute a process still grows with what it meets for the first time; measured: up to 49.
        pytest.param(60.0, 80.0, marks=pytest.mark.timeout(400)),
        # Measured: 0.4 for prefill, 1.8 for decode, which meets 3 new lives of peers a minute. Less than 1 is wanted.
        pytest.param(600.0, 4.0, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_a_storm_of_failures_leaves_nothing_behind(
    group: ProcessGroup, folder: Path, duration_s: float, most_growth_mb_per_minute: float
) -> None:
    reference = Reference(folder)
    for seed in range(NUM_PROMPTS):
        reference(prompt_of(seed), 4 + seed % 20)
    files_before = shared_memory_files()
    storm = Storm(group, reference, random.Random(2), duration_s)  # noqa: S311 - a storm, not a secret

    work = [storm.send_requests() for _ in range(NUM_CLIENTS)]
    await asyncio.wait_for(
        asyncio.gather(*work, storm.break_things(), storm.watch_memory()), duration_s + 3 * REQUEST_TIMEOUT_S
    )

    tally = storm.tally
    print(f"\n{dict(tally.outcomes)}\n{dict(tally.blows)}\n{growth_of(tally)}")
    assert not tally.wrong, tally.wrong
    assert tally.outcomes["whole"] > duration_s
    assert not [outcome for outcome in tally.outcomes if outcome.startswith("fatal")]
    assert len(tally.blows) >= 3
    await group.mend()
    await group.until_baseline(20.0)
    await check_every_prompt(storm)
    await group.until_baseline()
    for name, growth_mb_per_minute in growth_of(tally).items():
        assert growth_mb_per_minute < most_growth_mb_per_minute, (name, tally.memory_mb[name])
    assert shared_memory_files() <= files_before


def shared_memory_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())  # noqa: S108 - looked at, not written to


async def check_every_prompt(storm: Storm) -> None:
    for seed in range(NUM_PROMPTS):
        prompt, max_tokens = prompt_of(seed), 4 + seed % 20
        answer = await storm.group.client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        assert list(answer.token_ids) == storm.reference(prompt, max_tokens)


def growth_of(tally: Tally) -> dict[str, float]:
    """MB per minute in the last half of the run, by process."""
    return {
        name: statistics.linear_regression(*zip(*samples, strict=True)).slope * 60
        for name, samples in tally.memory_mb.items()
        if len(samples) > 10
    }
