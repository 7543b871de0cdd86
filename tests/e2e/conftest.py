"""Whole systems on the real model: real Ray, real Valkey, real NIXL, real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.config import PoolConfig
from deployments.local_stack import LocalStack
from deployments.model_source import resolve_model
from tests.e2e.system import make_config


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def disaggregated(demo_folder: Path) -> Iterator[LocalStack]:
    config = make_config(
        PoolConfig(name="prefill", role="prefill", host="127.0.0.1", num_threads=2),
        PoolConfig(name="decode", role="decode", host="127.0.0.1", num_threads=1),
    )
    with LocalStack(config, lambda _: None) as stack:
        yield stack


@pytest.fixture(scope="module")
def unified(demo_folder: Path) -> Iterator[LocalStack]:
    config = make_config(PoolConfig(name="unified", role="unified", host="127.0.0.1", num_threads=2))
    with LocalStack(config, lambda _: None) as stack:
        yield stack
