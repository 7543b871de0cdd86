from collections.abc import Sequence

import pytest

from engine.batch import Batch, Row, RowResult
from engine.runner_faults import with_faults
from kv_store.local_cache import BlockCopy
from messages.errors import ServingError
from messages.fault_plan import parse_faults
from messages.faults import NO_FAULTS, Faults
from messages.requests import RequestId


class CountingRunner:
    def __init__(self) -> None:
        self.num_steps = 0
        self.copied: list[BlockCopy] = []

    def run(self, batch: Batch) -> Sequence[RowResult]:
        self.num_steps += 1
        return ()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.copied.extend(copies)


def step(*starts: int, prompt: int = 4) -> Batch:
    return Batch(
        rows=tuple(
            Row(
                request_id=RequestId(str(n)),
                token_ids=(1,),
                start=start,
                block_ids=(),
                sampling=None,
                prompt=[0] * prompt,
            )
            for n, start in enumerate(starts)
        )
    )


@pytest.mark.parametrize(("point", "batch"), [("engine.prefill_chunk", step(3)), ("engine.decode_step", step(4, 9))])
def test_a_step_passes_the_point_of_its_kind(point: str, batch: Batch) -> None:
    runner = CountingRunner()
    faulty = with_faults(runner, Faults(parse_faults(f"{point}:error*1")))

    with pytest.raises(ServingError):
        faulty.run(batch)
    assert runner.num_steps == 0
    faulty.run(batch)
    assert runner.num_steps == 1


def test_a_step_with_any_prompt_in_it_counts_as_prefill() -> None:
    runner = CountingRunner()
    faulty = with_faults(runner, Faults(parse_faults("engine.decode_step:error")))

    faulty.run(step(9, 0))
    with pytest.raises(ServingError):
        faulty.run(step(9, 4))

    assert runner.num_steps == 1


def test_without_a_plan_the_runner_is_the_same_object() -> None:
    runner = CountingRunner()

    assert with_faults(runner, NO_FAULTS) is runner
