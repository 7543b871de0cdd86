"""The failure-window table: in every window of a request's life something breaks, and nothing is lost, leaked or wrong.

Real processes: they are killed and stopped, sockets are closed, shards die, messages come twice. Each cell ends with
exactly one terminal event, no wrong token, every worker at baseline, and the same request right afterwards as if
nothing had been.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from kvferry import AsyncClient, KVFerryError
from tests.integration.process_group import ProcessGroup, Reference, make_prompt, save_model_with_tokenizer

pytestmark = [
    pytest.mark.redis,
    pytest.mark.nixl,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

WORKERS = {"p1": "prefill", "p2": "prefill", "d1": "decode"}
PREFILL = ("p1", "p2")
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup(folder, tmp_path_factory.mktemp("group"), WORKERS, keeps_addresses=True) as group:
        yield group


@pytest_asyncio.fixture(loop_scope="module")
async def group(whole_group: ProcessGroup) -> AsyncIterator[ProcessGroup]:
    await whole_group.mend()
    await whole_group.until_baseline()
    yield whole_group


@dataclass
class Story:
    """One request of a real client, and everything that came of it."""

    group: ProcessGroup
    prompt: list[int]
    max_tokens: int
    client: AsyncClient
    tokens: list[int] = field(default_factory=list)
    error: KVFerryError | None = None
    num_endings: int = 0
    preemptions_before: float = 0.0

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.client.stream(
            self.prompt, max_tokens=self.max_tokens, temperature=0, ignore_eos=True, timeout_s=DEADLINE_S
        ) as chunks:
            try:
                async for chunk in chunks:
                    self.tokens.extend(chunk.token_ids)
            except KVFerryError as error:
                self.error = error
            else:
                assert chunks.result.usage.completion_tokens == len(self.tokens)
            self.num_endings += 1

    async def end(self) -> None:
        await asyncio.wait_for(self.task, DEADLINE_S + 5)


@dataclass(frozen=True, kw_only=True)
class Window:
    """How a request is brought into a window and held there."""

    faults: dict[str, str]
    """By worker; none in any other."""
    is_there: Callable[[Story], bool]
    prompt_tokens: int = 60
    max_tokens: int = 12
    num_blockers: int = 0
    """Requests that keep the prefill workers busy."""


def _busy(group: ProcessGroup, state: str) -> list[str]:
    return [name for name in PREFILL if getattr(group.sample(name), state) >= 1]


def _preempted(story: Story) -> bool:
    return story.group.sample("d1").counters["preemptions_total"] > story.preemptions_before


SLOW_PREFILL = dict.fromkeys(PREFILL, "engine.prefill_chunk:delay=0.15")
WINDOWS = {
    "W1 queued at prefill": Window(
        faults=SLOW_PREFILL,
        is_there=lambda story: bool(_busy(story.group, "waiting")),
        prompt_tokens=200,
        num_blockers=2,
    ),
    "W2 prefill computes": Window(
        faults=SLOW_PREFILL, is_there=lambda story: bool(_busy(story.group, "handoffs")), prompt_tokens=200
    ),
    "W3 prefill done, nothing read": Window(
        faults=dict.fromkeys(PREFILL, "handoff.open:delay=0.8"), is_there=lambda story: len(story.tokens) == 1
    ),
    "W4 blocks move": Window(faults={"d1": "transfer.read:delay=0.8"}, is_there=lambda story: len(story.tokens) == 1),
    "W5 decode": Window(
        faults={"d1": "engine.decode_step:delay=0.05"}, is_there=lambda story: len(story.tokens) > 2, max_tokens=30
    ),
    "W6 decode preempted": Window(
        faults={"d1": "engine.preempt_once,engine.prefill_chunk:delay=0.2"}, is_there=_preempted, max_tokens=30
    ),
    "W7 the end is on its way": Window(
        faults={"d1": "worker.event:delay=0.5"},
        is_there=lambda story: len(story.tokens) == 1 and story.group.sample("d1").running == 0,
        max_tokens=2,
    ),
}


class Seeds:
    """Every cell has a prompt of its own, so that nothing is cached."""

    def __init__(self) -> None:
        self.last = 1000

    def next(self) -> int:
        self.last += 1
        return self.last


SEEDS = Seeds()


async def bring_to(group: ProcessGroup, window: Window, client: AsyncClient | None = None) -> tuple[Story, list[Story]]:
    """Start a request, and what it takes to get it into the window; return when it is there."""
    for name, faults in window.faults.items():
        await group.inject(name, faults)
    blockers = [Story(group, make_prompt(400, SEEDS.next()), 2, group.client) for _ in range(window.num_blockers)]
    for count, blocker in enumerate(blockers, start=1):
        blocker.start()
        # Each is seen in the loads before the next is placed, so they go to different workers.
        await group.until(lambda count=count: len(_busy(group, "running")) == count)  # type: ignore[misc] # bound at once
    story = Story(group, make_prompt(window.prompt_tokens, SEEDS.next()), window.max_tokens, client or group.client)
    story.preemptions_before = group.sample("d1").counters["preemptions_total"]
    story.start()
    await group.until(lambda: window.is_there(story))
    return story, blockers


def prefill_of(story: Story) -> str:
    """The prefill worker that has, or had, the request."""
    busy = [*_busy(story.group, "waiting"), *_busy(story.group, "handoffs"), *_busy(story.group, "running")]
    return busy[0] if busy else PREFILL[0]


async def check_afterwards(group: ProcessGroup, reference: Reference, *stories: Story) -> None:
    """Baseline everywhere, and the same requests again are right."""
    await group.until_baseline()
    await group.mend()
    await group.until_baseline()
    for story in stories:
        again = await group.client.generate(
            story.prompt, max_tokens=story.max_tokens, temperature=0, ignore_eos=True, timeout_s=DEADLINE_S
        )
        assert list(again.token_ids) == reference(story.prompt, story.max_tokens)
    await group.until_baseline()


def assert_right(story: Story, reference: Reference) -> None:
    assert story.num_endings == 1
    assert story.error is None, story.error
    assert story.tokens == reference(story.prompt, story.max_tokens)


def assert_begins_right(story: Story, reference: Reference) -> None:
    assert story.tokens == reference(story.prompt, story.max_tokens)[: len(story.tokens)]


@asynccontextmanager
async def counted(group: ProcessGroup, code: str) -> AsyncIterator[list[Story]]:
    """Afterwards the metric of this outcome has risen by as many as there are stories in the list."""
    stories: list[Story] = []
    before = group.num_requests(code)
    yield stories
    await group.until(lambda: group.num_requests(code) == before + len(stories))


def windows(*in_every_run: str) -> pytest.MarkDecorator:
    """All windows; those whose first word is not named only with full counts."""
    return pytest.mark.parametrize(
        "window",
        [
            pytest.param(window, id=name, marks=() if name.split()[0] in in_every_run else pytest.mark.slow)
            for name, window in WINDOWS.items()
        ],
    )


@windows("W1", "W2", "W3", "W4", "W5", "W7")
@pytest.mark.parametrize("how", ["leaves the stream", pytest.param("closes the socket", marks=pytest.mark.slow)])
async def test_the_client_goes(group: ProcessGroup, reference: Reference, window: Window, how: str) -> None:
    """Rule 4: from every state everything is given back."""
    client = AsyncClient(f"127.0.0.1:{group.config.gateway.grpc_port}")
    async with counted(group, "CANCELLED") as cancelled:
        story, blockers = await bring_to(group, window, client)
        cancelled.append(story)

        if how == "leaves the stream":
            story.task.cancel()
            await asyncio.wait([story.task])
        await client.close()
        await asyncio.wait([story.task])

    assert_begins_right(story, reference)
    for blocker in blockers:
        await blocker.end()
        assert_right(blocker, reference)
    await check_afterwards(group, reference, story)


@windows("W1", "W2", "W3", "W4", "W5", "W6")
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=str)
async def test_prefill_goes(group: ProcessGroup, reference: Reference, window: Window, blow: signal.Signals) -> None:
    """Another prefill worker computes the prompt, or decode computes what it lacks; the client sees nothing of it."""
    async with counted(group, "OK") as well:
        story, blockers = await bring_to(group, window)

        group.workers[prefill_of(story)].send_signal(blow)

        for one in (story, *blockers):
            await one.end()
            assert_right(one, reference)
            well.append(one)
    await check_afterwards(group, reference, story)


@pytest.mark.parametrize(
    "num_lives", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=str
)
async def test_prefill_restarts_on_its_address(group: ProcessGroup, reference: Reference, num_lives: int) -> None:
    """Cases 2 and 3: decode reads from every life, and keeps no more registrations than there are live peers."""
    decode = group.workers["d1"]
    for number in range(num_lives + 1):
        prompt = make_prompt(60, SEEDS.next())
        answer = await group.client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
        assert list(answer.token_ids) == reference(prompt, 4)
        assert answer.provenance.decode_computed_tokens == 0
        if number < num_lives:
            await group.workers[answer.provenance.prefill_worker].kill()
            await group.start(answer.provenance.prefill_worker)
            await group.until_live(*WORKERS)
            async with asyncio.timeout(10):
                while await decode.num_peers() > len(PREFILL):  # noqa: ASYNC110 - it is in another process
                    await asyncio.sleep(0.1)

    assert group.workers["d1"] is decode
    assert decode.is_alive
    await group.until_baseline()


@windows("W2", "W4", "W5")
@pytest.mark.parametrize("num_lost", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_registry_shards_go(group: ProcessGroup, reference: Reference, window: Window, num_lost: int) -> None:
    async with counted(group, "OK") as well:
        story, blockers = await bring_to(group, window)

        for index in range(num_lost):
            group.shards.kill_shard(index)

        for one in (story, *blockers):
            await one.end()
            assert_right(one, reference)
            well.append(one)
    await check_afterwards(group, reference, story)


@windows("W2", "W4", "W5", "W7")
async def test_decode_goes(group: ProcessGroup, reference: Reference, window: Window) -> None:
    """Before token 1 the request may be placed anew; afterwards it ends in one error that has the tokens so far."""
    async with counted(group, "UNAVAILABLE") as lost:
        story, blockers = await bring_to(group, window)

        await group.workers["d1"].kill()

        for one in (story, *blockers):
            await one.end()
            assert one.num_endings == 1
            assert one.error is not None
            assert one.error.retryable
            assert_begins_right(one, reference)
            lost.append(one)
    await check_afterwards(group, reference, story)


TWICE = ",".join(
    f"{point}:duplicate"
    for point in (
        "worker.message",
        "worker.event",
        "handoff.open",
        "handoff.close",
        "handoff.release",
        "handoff.heartbeat",
    )
)


@windows("W1", "W2", "W4", "W7")
async def test_every_message_comes_twice(group: ProcessGroup, reference: Reference, window: Window) -> None:
    twice = Window(
        faults={name: ",".join(filter(None, (window.faults.get(name, ""), TWICE))) for name in WORKERS},
        is_there=window.is_there,
        prompt_tokens=window.prompt_tokens,
        max_tokens=window.max_tokens,
        num_blockers=window.num_blockers,
    )
    async with counted(group, "OK") as well:
        story, blockers = await bring_to(group, twice)

        for one in (story, *blockers):
            await one.end()
            assert_right(one, reference)
            well.append(one)
    await check_afterwards(group, reference, story)


async def test_a_registry_that_loses_everything_loses_no_request(group: ProcessGroup, reference: Reference) -> None:
    """Case 31, rule 5: FLUSHALL on every shard under load."""
    stories: list[Story] = []
    for number in range(12):
        stories.append(Story(group, make_prompt(60, SEEDS.next()), 12, group.client))
        stories[-1].start()
        if number % 4 == 1:
            for url in group.shards.urls:
                with redis.Redis.from_url(url) as shard:
                    shard.flushall()
        await asyncio.sleep(0.15)
    for story in stories:
        await story.end()
        assert_right(story, reference)
    await check_afterwards(group, reference, stories[0])


LATE = "handoff.close:delay=1.5*1,handoff.heartbeat:delay=4*1,handoff.release:delay=4*1"


async def test_late_messages_of_a_hand_off_change_nothing(group: ProcessGroup, reference: Reference) -> None:
    for name in PREFILL:
        await group.inject(name, LATE)
    stories = [Story(group, make_prompt(60, SEEDS.next()), 12, group.client) for _ in range(4)]
    for story in stories:
        story.start()
    for story in stories:
        await story.end()
        assert_right(story, reference)
    await check_afterwards(group, reference, *stories)
