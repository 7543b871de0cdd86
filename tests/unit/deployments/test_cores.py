"""Cores of this process: what cannot be had, and that nothing changes unasked."""

import os

import pytest

from deployments.worker.cores import bind_process
from messages.errors import ConfigError


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cpu_affinity \[4000\].*offers cores"):
        bind_process([4000], 0)


def test_without_a_wish_nothing_changes() -> None:
    before = os.sched_getaffinity(0)

    assert bind_process(None, 0) == len(before)
    assert os.sched_getaffinity(0) == before
