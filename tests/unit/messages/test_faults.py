import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from messages.errors import ServingError, TransferError
from messages.fault_plan import parse_faults
from messages.faults import NO_FAULTS, Faults


def planned(text: str, pool: str | None = None, kills: list[str] | None = None) -> Faults:
    return Faults(parse_faults(text), pool=pool, kill=lambda: (kills if kills is not None else []).append("killed"))


def test_times_and_skip_count_passes() -> None:
    faults = planned("handoff.close:drop*2+1")

    assert [faults.fire("handoff.close").is_dropped for _ in range(5)] == [False, True, True, False, False]


def test_rules_of_one_point_fire_together_and_of_other_points_never() -> None:
    faults = planned("handoff.close:drop+1,handoff.close:delay=2")

    first, second = faults.fire("handoff.close"), faults.fire("handoff.close")

    assert (first.is_dropped, first.delay_s) == (False, 2.0)
    assert (second.is_dropped, second.delay_s) == (True, 2.0)
    assert not faults.fire("handoff.open").is_dropped


def test_a_rule_for_a_pool_holds_for_its_workers_alone() -> None:
    text = "handoff.close:drop@decode,clock:skew=1"

    assert planned(text, pool="decode").has("handoff.")
    assert not planned(text, pool="prefill").has("handoff.")
    assert not planned(text).has("handoff.")
    assert str(planned(text, pool="decode")) == text
    assert str(planned(text, pool="prefill")) == "clock:skew=1"
    assert planned(text).has("clock")


def test_nothing_is_set_without_a_plan() -> None:
    assert not NO_FAULTS.is_set
    assert not planned("clock:skew=1@decode", pool="prefill").is_set
    assert NO_FAULTS.skewed(time.monotonic) is time.monotonic


async def test_passing_a_point_waits_and_raises_as_planned() -> None:
    faults = planned("handoff.open:delay=0.05,handoff.open:error+1")
    started_s = time.monotonic()

    await faults.at("handoff.open")
    assert time.monotonic() - started_s >= 0.05
    with pytest.raises(TransferError, match="a fault was asked for"):
        await faults.at("handoff.open", TransferError)


def test_passing_a_point_on_a_thread_does_the_same() -> None:
    faults = planned("engine.decode_step:delay=0.02,engine.decode_step:error+1")
    started_s = time.monotonic()

    faults.at_blocking("engine.decode_step")
    assert time.monotonic() - started_s >= 0.02
    with pytest.raises(ServingError):
        faults.at_blocking("engine.decode_step")


async def test_a_kill_comes_after_the_delay_and_before_anything_else() -> None:
    kills: list[str] = []

    with pytest.raises(ServingError):
        await planned("handoff.close:kill,handoff.close:error", kills=kills).at("handoff.close")

    assert kills == ["killed"]


def test_a_clock_jumps_after_the_passes_that_are_skipped() -> None:
    clock = planned("clock:skew=60+2").skewed(lambda: 5.0)

    assert [clock() for _ in range(4)] == [5.0, 5.0, 65.0, 65.0]


def test_a_kill_is_the_signal_that_cannot_be_caught() -> None:
    script = (
        "from messages.faults import Faults\nfrom messages.fault_plan import parse_faults\n"
        "faults = Faults(parse_faults('engine.decode_step:kill+1'))\n"
        "faults.at_blocking('engine.decode_step')\nprint('once', flush=True)\n"
        "faults.at_blocking('engine.decode_step')\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )

    assert ended.stdout == "once\n"
    assert ended.returncode == -signal.SIGKILL
