"""Whole systems on the real model: real Ray, real Valkey, real NIXL, real sockets."""

import contextlib
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


class Stacks:
    """At most one running system, kept while tests ask for the same kind: a start takes half a minute."""

    def __init__(self) -> None:
        self._kind = ""
        self._exits = contextlib.ExitStack()
        self._stack: LocalStack | None = None

    def get(self, kind: str, *pools: PoolConfig) -> LocalStack:
        if self._stack is None or kind != self._kind:
            self.close()
            self._stack = self._exits.enter_context(LocalStack(make_config(*pools), lambda _: None))
            self._kind = kind
        return self._stack

    def close(self) -> None:
        self._stack = None
        self._exits.close()


@pytest.fixture(scope="session")
def stacks(demo_folder: Path) -> Iterator[Stacks]:
    stacks = Stacks()
    yield stacks
    stacks.close()


@pytest.fixture
def disaggregated(stacks: Stacks) -> LocalStack:
    return stacks.get(
        "disaggregated",
        PoolConfig(name="prefill", role="prefill", host="127.0.0.1", num_threads=2),
        PoolConfig(name="decode", role="decode", host="127.0.0.1", num_threads=1),
    )


@pytest.fixture
def unified(stacks: Stacks) -> LocalStack:
    return stacks.get("unified", PoolConfig(name="unified", role="unified", host="127.0.0.1", num_threads=2))
