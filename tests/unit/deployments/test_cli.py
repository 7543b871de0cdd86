"""The command line without starting anything: help, usage errors, config commands, one-line errors."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from deployments import cli
from deployments.cli.commands import app
from deployments.cli.interrupt import StopSignals


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    # The command's console is bound to the real stdout; a fresh one follows the runner's.
    monkeypatch.setattr("deployments.cli.commands.output", Console(width=200))
    return CliRunner()


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "-h"], ["demo", "-h"], ["model", "-h"], ["config", "-h"]])
def test_every_command_has_help(runner: CliRunner, arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)

    assert result.exit_code == 0
    assert "Usage" in result.output


def test_serve_without_model_or_config_is_a_usage_error(runner: CliRunner) -> None:
    result = runner.invoke(app, ["serve"])

    assert result.exit_code == 2
    assert "--model" in result.output


def test_an_assignment_without_a_value_is_a_usage_error(runner: CliRunner) -> None:
    result = runner.invoke(app, ["config", "show", "--set", "gateway.grpc_port"])

    assert result.exit_code == 2
    assert "FIELD=VALUE" in result.output


def test_config_show_prints_a_file_that_config_validate_accepts(runner: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"

    path.write_text(runner.invoke(app, ["config", "show", "--set", "models.0.max_running=7"]).output)
    result = runner.invoke(app, ["config", "validate", str(path)])

    assert yaml.safe_load(path.read_text())["models"][0]["max_running"] == 7
    assert result.exit_code == 0
    assert "is valid" in result.output


def test_config_schema_is_json(runner: CliRunner) -> None:
    schema = json.loads(runner.invoke(app, ["config", "schema"]).output)

    assert schema["title"] == "AppConfig"


def test_version_is_printed(runner: CliRunner) -> None:
    assert runner.invoke(app, ["version"]).output.startswith("kvferry ")


def test_a_foreseen_failure_is_one_line_on_stderr_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 3\nmodels: [{source: demo}]\n")
    monkeypatch.setattr(sys, "argv", ["kvferry", "config", "validate", str(bad)])
    monkeypatch.setattr(cli, "errors", Console(stderr=True, width=500))

    with pytest.raises(SystemExit) as exit_:
        cli.main()

    captured = capsys.readouterr()
    assert exit_.value.code == 1
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "version: Input should be 1" in captured.err


def test_the_first_signal_interrupts_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    forced: list[str] = []

    with pytest.raises(KeyboardInterrupt), StopSignals(lambda: forced.append("x")):
        os.kill(os.getpid(), signal.SIGTERM)

    assert forced == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_forces_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    monkeypatch.setattr(os, "_exit", events.append)

    def interrupted_twice() -> None:
        with StopSignals(lambda: events.append("forced")):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()

    assert events == ["forced", 130]
