"""The real engine in this process, for benchmarks: scheduler, cache, runner and step thread, without a network."""

import queue
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from engine.admission import SchedulerLimits
from engine.batch import Batch, Row
from engine.events import Failed, StepOutput
from engine.loop import EngineLoop
from engine.model_runner import ModelRunner
from engine.request import Part
from engine.scheduler import Scheduler
from engine.weights import LoadedModel, kv_layout
from kv_store.block_key import KeyExtras
from kv_store.layout import Arena
from kv_store.local_cache import BlockCopy, LocalCache
from messages.handoff import BlockId
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import TokenEvent

BLOCK = 32
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class LocalEngine:
    """One engine over an arena of its own; measures whole requests from submission to their tokens."""

    def __init__(self, loaded: LoadedModel, num_tokens: int, chunk_tokens: int) -> None:
        layout = kv_layout(loaded.config, loaded.dtype, BLOCK, loaded.digest)
        num_blocks = (-(-num_tokens // BLOCK),) * len(layout.groups)
        self._loaded = loaded
        self._layout = layout
        self.runner = ModelRunner(loaded, Arena(layout, num_blocks, loaded.device))
        limits = SchedulerLimits(
            block_size=BLOCK, max_step_tokens=max(512, chunk_tokens), max_chunk_tokens=chunk_tokens
        )
        cache = LocalCache(layout, num_blocks)
        self._outputs: queue.SimpleQueue[tuple[float, StepOutput]] = queue.SimpleQueue()
        self._loop = EngineLoop(Scheduler(cache, limits), cache, self.runner, self, self._take)
        self._num_requests = 0

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    def extras(self, request: GenerationRequest) -> KeyExtras:
        """What block keys say besides tokens."""
        return KeyExtras(
            model=self._loaded.digest,
            block_size=BLOCK,
            codec=self._layout.groups[0].codec,
            adapter=request.adapter,
            salt=request.salt,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        """Submit all prompts at once and wait for `num_new` greedy tokens of each.

        Returns:
            Seconds until the first token of any, and until the last token of all.

        Raises:
            ServingError: A request failed.
        """
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
        started_s = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            request = GenerationRequest(
                request_id=RequestId(f"bench-{self._num_requests}"),
                model="bench",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
            )
            self._loop.submit(request, Part.WHOLE)
        first_s, last_s, num_left = 0.0, 0.0, len(prompts)
        while num_left:
            at_s, output = self._outputs.get()
            for event in output.events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, TokenEvent):
                    first_s = first_s or at_s
                    num_left -= event.finish_reason is not None
            last_s = at_s
        return first_s - started_s, last_s - started_s

    def _take(self, output: StepOutput) -> None:
        self._outputs.put((time.perf_counter(), output))


class LocalDecode:
    """A batch of equally long sequences in blocks of their own; each step lengthens it by one token.

    It drives the runner itself, so that single steps can alternate with those of another system. The engine's loop must
    be idle, and what it had cached is overwritten.
    """

    def __init__(self, runner: ModelRunner, prompt: Sequence[int], batch: int, max_new: int) -> None:
        self._runner = runner
        per_row = -(-(len(prompt) + max_new) // BLOCK)
        self._tables = [tuple(BlockId(row * per_row + i) for i in range(per_row)) for row in range(batch)]
        self._length = len(prompt)
        for start in range(0, len(prompt), 512):
            runner.run(Batch(rows=(self._row(0, prompt[start : start + 512], start),)))
        used = -(-len(prompt) // BLOCK)
        for table in self._tables[1:]:
            runner.copy_blocks([BlockCopy(group=0, source=self._tables[0][i], target=table[i]) for i in range(used)])

    def step(self, tokens: Sequence[int]) -> list[int]:
        """Give each sequence a token and return the greedy next ones."""
        rows = tuple(self._row(number, [token], self._length) for number, token in enumerate(tokens))
        self._length += 1
        return [result.samples[0].token_ids[0] for result in self._runner.run(Batch(rows=rows))]

    def _row(self, number: int, tokens: Sequence[int], start: int) -> Row:
        end = start + len(tokens)
        return Row(
            request_id=RequestId(str(number)),
            token_ids=tuple(tokens),
            start=start,
            block_ids=(self._tables[number][: -(-end // BLOCK)],),
            sampling=_GREEDY,
        )


def random_prompt(generator: torch.Generator, length: int) -> list[int]:
    """Ordinary tokens of the demo model, never the same twice, so that no prefix is cached."""
    prompt: list[int] = torch.randint(1000, 40_000, (length,), generator=generator).tolist()
    return prompt
