"""A decode worker is killed under a stream; another one goes on, and the client sees nothing of it.

Real processes, NIXL, Valkey and sockets. A choice is told by its tokens: they equal those of the same request when
nothing happens, whatever state it carried (penalties, seed, grammar, log probabilities, several choices).
"""

import asyncio
import re
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvferry import Completion, KVFerryError
from tests.integration.process_group import ProcessGroup, Reference, make_prompt, save_model_with_tokenizer

pytestmark = [
    pytest.mark.redis,
    pytest.mark.nixl,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]
WORKERS = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
DECODE = ("d1", "d2", "d3")
SLOW_DECODE = "engine.decode_step:delay=0.03"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup(folder, tmp_path_factory.mktemp("group"), WORKERS) as group:
        yield group


@pytest_asyncio.fixture(loop_scope="module")
async def group(whole_group: ProcessGroup) -> AsyncIterator[ProcessGroup]:
    await whole_group.mend()
    await whole_group.until_baseline()
    yield whole_group


@dataclass
class Story:
    """One stream as its client sees it."""

    group: ProcessGroup
    prompt: list[int]
    parameters: dict[str, Any]
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    result: Completion | None = None
    error: KVFerryError | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.group.client.stream(self.prompt, timeout_s=30, **self.parameters) as chunks:
            try:
                async for chunk in chunks:
                    self.tokens[chunk.choice].extend(chunk.token_ids)
                self.result = chunks.result
            except KVFerryError as error:
                self.error = error

    async def until_tokens(self, count: int) -> None:
        """Wait until every choice has so many."""
        num_choices = self.parameters.get("n") or 1
        await self.group.until(lambda: len(self.tokens) == num_choices and min(map(len, self.tokens.values())) >= count)

    async def end(self) -> Completion:
        await asyncio.wait_for(self.task, 40)
        assert self.error is None, self.error
        assert self.result is not None
        assert [choice.token_ids for choice in self.result.choices] == [
            tuple(self.tokens[number]) for number in range(len(self.result.choices))
        ]
        return self.result


async def decode_of(group: ProcessGroup) -> str:
    """The decode worker that has the request, once its heartbeat says so."""

    def busy() -> list[str]:
        samples = group.gateway.links.samples()
        return [one.worker_id for one in samples if one.worker_id in DECODE and one.running + one.waiting]

    await group.until(lambda: bool(busy()))
    return busy()[0]


async def slow_down(group: ProcessGroup) -> None:
    for name in DECODE:
        await group.inject(name, SLOW_DECODE)


async def disturbed(group: ProcessGroup, story: Story, *after: int) -> Completion:
    """Run a story whose decode worker is killed each time it has so many tokens."""
    await slow_down(group)
    story.start()
    for count in after:
        await story.until_tokens(count)
        await group.workers[await decode_of(group)].kill()
    result = await story.end()
    await group.mend()
    await group.until_baseline()
    return result


@pytest.mark.parametrize(
    "lost_after", [1, pytest.param(2, marks=pytest.mark.slow), 9, pytest.param(20, marks=pytest.mark.slow)]
)
async def test_the_client_sees_one_gapless_stream_with_the_same_tokens(
    group: ProcessGroup, reference: Reference, lost_after: int
) -> None:
    """Case 27."""
    story = Story(group, make_prompt(60, lost_after), {"max_tokens": 30, "temperature": 0, "ignore_eos": True})

    result = await disturbed(group, story, lost_after)

    assert story.tokens[0] == reference(story.prompt, 30)
    assert result.provenance.num_replays == 1
    assert result.usage.prompt_tokens == 60
    assert result.usage.completion_tokens == 30


async def test_a_choice_outlives_several_workers(group: ProcessGroup, reference: Reference) -> None:
    story = Story(group, make_prompt(60, 77), {"max_tokens": 60, "temperature": 0, "ignore_eos": True})

    result = await disturbed(group, story, 5, 25)

    assert story.tokens[0] == reference(story.prompt, 60)
    assert result.provenance.num_replays == 2


STOPS = list(range(3, 40))
CARRIED = {
    "seed": {"temperature": 1.0, "seed": 5, "top_p": 0.95},
    "penalties": {
        "temperature": 0.8,
        "seed": 6,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "several choices": {"temperature": 1.0, "seed": 7, "n": 3},
    "min_tokens and stop tokens": {
        "temperature": 1.0,
        "seed": 8,
        "min_tokens": 25,
        "stop_token_ids": list(range(3, 40)),
    },
}


@pytest.mark.parametrize(
    "carried",
    [
        pytest.param(carried, id=name, marks=() if name in ("penalties", "several choices") else pytest.mark.slow)
        for name, carried in CARRIED.items()
    ],
)
async def test_what_a_choice_carries_goes_with_it(group: ProcessGroup, carried: dict[str, Any]) -> None:
    """Rule 23."""
    parameters = {"max_tokens": 30, "ignore_eos": True} | carried
    prompt = make_prompt(60, 500 + len(str(carried)))
    story, undisturbed = (Story(group, prompt, parameters) for _ in range(2))

    result = await disturbed(group, story, 9)
    undisturbed.start()
    expected = await undisturbed.end()

    assert result.provenance.num_replays == 1
    assert expected.provenance.num_replays == 0
    assert story.tokens == undisturbed.tokens
    for choice, other in zip(result.choices, expected.choices, strict=True):
        assert (choice.finish_reason, choice.stop) == (other.finish_reason, other.stop)
        for entry, expected_entry in zip(choice.logprobs, other.logprobs, strict=True):
            assert entry.token_id == expected_entry.token_id
            assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-3)


async def test_a_grammar_goes_on_where_it_was(group: ProcessGroup) -> None:
    """Case 25: a grammar that began anew would ask for forty more words."""
    story = Story(group, make_prompt(60, 90), {"max_tokens": 80, "seed": 3, "regex": "(w[3-9]){40}"})

    result = await disturbed(group, story, 10)

    assert re.fullmatch("(w[3-9]){40}", str(result))
    assert result.provenance.num_replays == 1


async def test_the_limits_of_a_request_count_from_its_beginning(group: ProcessGroup, reference: Reference) -> None:
    """Case 26: 20 of 50 tokens are there when the worker dies; prompt and output fill the context exactly."""
    context_length = (await group.client.models())[0].context_length
    prompt = make_prompt(context_length - 50, 91)
    story = Story(group, prompt, {"max_tokens": 50, "temperature": 0, "ignore_eos": True})

    result = await disturbed(group, story, 20)

    assert story.tokens[0] == reference(prompt, 50)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (context_length - 50, 50)


async def test_a_worker_that_stops_answering_is_replaced_as_well(group: ProcessGroup, reference: Reference) -> None:
    await slow_down(group)
    story = Story(group, make_prompt(60, 92), {"max_tokens": 30, "temperature": 0, "ignore_eos": True})
    story.start()
    await story.until_tokens(9)

    group.workers[await decode_of(group)].send_signal(signal.SIGSTOP)
    result = await story.end()

    assert story.tokens[0] == reference(story.prompt, 30)
    assert result.provenance.num_replays == 1
    await group.mend()
    await group.until_baseline()


async def test_a_client_that_leaves_during_a_replay_leaves_nothing_behind(group: ProcessGroup) -> None:
    await slow_down(group)
    for name in ("p1", "p2"):
        await group.inject(name, "engine.prefill_chunk:delay=0.3")
    story = Story(group, make_prompt(60, 93), {"max_tokens": 60, "temperature": 0, "ignore_eos": True})
    story.start()
    await story.until_tokens(9)
    await group.workers[await decode_of(group)].kill()
    await group.until(lambda: any(group.sample(name).running for name in ("p1", "p2")))

    story.task.cancel()
    await asyncio.wait([story.task])

    await group.until_baseline()


async def test_many_streams_of_one_worker_go_on_elsewhere(group: ProcessGroup, reference: Reference) -> None:
    await slow_down(group)
    stories = [
        Story(
            group, make_prompt(30 + 5 * number, 200 + number), {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        )
        for number in range(8)
    ]
    for story in stories:
        story.start()
    for story in stories:
        await story.until_tokens(4)

    await group.workers["d1"].kill()
    results = [await story.end() for story in stories]

    for story in stories:
        assert story.tokens[0] == reference(story.prompt, 60)
    assert {result.provenance.num_replays for result in results} == {0, 1}
    await group.mend()
    await group.until_baseline()
