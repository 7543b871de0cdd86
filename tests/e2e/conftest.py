"""Whole systems on the real model: real Ray, real Valkey, real NIXL, real sockets."""

import contextlib
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

    def get(self, kind: str, *pools: PoolConfig, **model: object) -> LocalStack:
        if self._stack is None or kind != self._kind:
            self.close()
            self._stack = self._exits.enter_context(LocalStack(make_config(*pools, **model), lambda _: None))
            self._kind = kind
        return self._stack

    def close(self) -> None:
        self._stack = None
        self._exits.close()


STACKS = pytest.StashKey[Stacks]()


@pytest.fixture(scope="session")
def stacks(demo_folder: Path, request: pytest.FixtureRequest) -> Stacks:
    return request.session.stash.setdefault(STACKS, Stacks())


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the system behind the last test of this folder, not behind the last of all."""
    stacks = item.session.stash.get(STACKS, None)
    if stacks is not None and (nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent)):
        stacks.close()


@pytest.fixture
def disaggregated(stacks: Stacks) -> LocalStack:
    return stacks.get(
        "disaggregated",
        PoolConfig(name="prefill", role="prefill", host="127.0.0.1", num_threads=2),
        PoolConfig(name="decode", role="decode", host="127.0.0.1", num_threads=1),
    )


PRESSURE_POOLS = (
    PoolConfig(name="prefill", role="prefill", host="127.0.0.1", num_threads=2),
    PoolConfig(name="decode", role="decode", host="127.0.0.1", num_threads=2),
)


@pytest.fixture
def small_arena(stacks: Stacks) -> LocalStack:
    """Room for about four of the sixteen requests that the test sends at once."""
    return stacks.get("small arena", *PRESSURE_POOLS, kv_num_blocks=20, block_size=16)


@pytest.fixture
def preempting(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> LocalStack:
    """Every request is preempted once, by a fault point."""
    monkeypatch.setenv("KVFERRY_FAULTS", "engine.preempt_once")
    return stacks.get("preempting", *PRESSURE_POOLS, kv_num_blocks=400, block_size=16)


@pytest.fixture
def unified(stacks: Stacks) -> LocalStack:
    return stacks.get("unified", PoolConfig(name="unified", role="unified", host="127.0.0.1", num_threads=2))
