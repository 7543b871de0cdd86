import pytest

from deployments.worker.rates import RateMeter, RunningRate
from kv_store.layout import BlockLayout, KvGroup
from telemetry.step_record import StepRecord

LAYOUT = BlockLayout(
    groups=(
        KvGroup(name="full", layers=(0, 1), num_kv_heads=2, k_dim=8, v_dim=8),
        KvGroup(name="window", layers=(2,), num_kv_heads=2, k_dim=8, v_dim=8, window=64),
    ),
    block_size=16,
    model_digest="m",
)


def step(prefill_tokens: int, duration_ms: float, decode_tokens: int = 0) -> StepRecord:
    return StepRecord(
        at_s=0.0,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        context_tokens=0,
        num_rows=1,
        duration_ms=duration_ms,
    )


def test_nothing_is_known_before_it_is_measured() -> None:
    message = RateMeter(LAYOUT).message()

    assert not message.HasField("prefill_tokens_s")
    assert not message.HasField("transfer_bytes_s")


def test_a_token_weighs_what_all_layers_of_its_group_keep() -> None:
    full, window = RateMeter(LAYOUT).message().groups

    assert full.token_bytes * LAYOUT.block_size == LAYOUT.block_bytes(0)
    assert not full.HasField("window")
    assert window.window == 64


def test_decodes_in_a_step_take_their_part_of_it_and_steps_of_decodes_say_nothing() -> None:
    meter = RateMeter(LAYOUT)
    meter.note_step(step(90, 100.0, decode_tokens=10))
    meter.note_step(step(1, 100.0, decode_tokens=10))

    assert meter.message().prefill_tokens_s == pytest.approx(1000.0)


def test_small_reads_say_nothing_about_the_rate() -> None:
    meter = RateMeter(LAYOUT)
    meter.note_transfer(1000, 0.01)
    meter.note_transfer(10**9, 0.5)

    assert meter.message().transfer_bytes_s == pytest.approx(2e9)


def test_the_rate_follows_the_newest_samples() -> None:
    rate = RunningRate(memory_s=1.0)
    for _ in range(50):
        rate.add(100.0, 0.1)
    for _ in range(50):
        rate.add(300.0, 0.1)

    assert rate.per_second == pytest.approx(3000.0, rel=0.02)
