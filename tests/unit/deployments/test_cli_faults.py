import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.commands import app
from messages.errors import ConfigError
from messages.fault_plan import FAULT_POINTS


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    # The command's console is bound to the real stdout; a fresh one follows the runner's.
    monkeypatch.setattr("deployments.cli.faults.output", Console(width=80))
    return CliRunner()


def test_every_point_is_listed_with_its_actions_and_the_syntax(runner: CliRunner) -> None:
    text = runner.invoke(app, ["faults"]).output

    assert "KVFERRY_FAULTS=point:action[=value][*times][+skip][@pool]" in text
    assert [name for name in FAULT_POINTS if f"{name}: " not in text] == []
    assert "transfer.read: corrupt delay=<seconds> error kill throttle=<GB/s>" in text
    assert "PLANNED" not in text


def test_what_this_environment_plans_is_marked(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_FAULTS", "clock:skew=-5+3@decode")

    text = runner.invoke(app, ["faults"]).output
    described = json.loads(runner.invoke(app, ["faults", "--json"]).output)

    assert text.count("PLANNED HERE") == 1
    assert "PLANNED HERE: clock:skew=-5+3@decode" in text
    planned = {point["point"]: point["planned"] for point in described["points"]}
    assert {name: rules for name, rules in planned.items() if rules} == {"clock": ["clock:skew=-5+3@decode"]}
    assert planned.keys() == FAULT_POINTS.keys()


def test_a_wrong_plan_is_an_error(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_FAULTS", "clock:drop")

    result = runner.invoke(app, ["faults"])

    assert isinstance(result.exception, ConfigError)
    assert "KVFERRY_FAULTS" in str(result.exception)
