"""`kvferry explain` against a fake gateway: tables and words for people, JSON for programs, one line for a failure."""

import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments import cli
from deployments.cli.commands import app
from kvferry import Unavailable
from kvferry.testing import Answer, FakeServer
from kvferry.v1 import inference_pb2 as v1

TIMES = (
    "first token predicted in 1,000.0 ms on the decode worker, 510.0 ms on the best prefill worker; "
    "the usual place is kept unless another one is clearly sooner"
)
LONG = " ".join(["word"] * 100)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    # The command's console is bound to the real stdout; a fresh one follows the runner's.
    monkeypatch.setattr("deployments.cli.explain.output", Console(width=160))
    return CliRunner()


def test_a_long_prompt_shows_both_comparisons_and_why_the_prompt_goes_elsewhere(runner: CliRunner) -> None:
    with FakeServer() as server:
        result = runner.invoke(app, ["explain", LONG, "--target", server.target])

    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert lines.index("decode, by predicted_latency") < lines.index("prefill, by predicted_latency")
    (decode,) = [line for line in lines if line.startswith("fake-decode ") and "decode  " in line]
    assert decode.split()[:6] == ["fake-decode", "decode", "chosen", "1,150.00", "0", "100"]
    assert decode.endswith("first_token_ms 510.00, tokens_ms 640.00")
    assert lines[-4:] == [
        "the prompt has 100 tokens",
        "fake-decode would decode",
        "fake-prefill would compute the prompt: the predicted times speak for a prefill worker",
        TIMES,
    ]


def test_a_short_prompt_shows_one_comparison(runner: CliRunner) -> None:
    with FakeServer() as server:
        result = runner.invoke(app, ["explain", "hello there", "--chat", "--target", server.target])

    assert result.exit_code == 0
    assert "prefill, by" not in result.output
    assert result.output.splitlines()[-1] == (
        "fake-decode would compute the prompt: few of its tokens are uncached there"
    )
    (request,) = server.requests
    assert request == v1.ExplainRequest(
        chat=v1.ChatRequest(messages=[v1.ChatMessage(role="user", content="hello there")], sampling=v1.SamplingParams())
    )


def test_on_a_narrow_terminal_every_part_of_a_cost_has_its_own_line(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.cli.explain.output", Console(width=80))

    with FakeServer() as server:
        lines = runner.invoke(app, ["explain", "hello", "--target", server.target]).output.splitlines()

    assert [line.split()[-2:] for line in lines[2:4]] == [["first_token_ms", "10.00"], ["tokens_ms", "640.00"]]


def test_json_has_everything(runner: CliRunner) -> None:
    with FakeServer() as server:
        result = runner.invoke(app, ["explain", LONG, "--json", "--target", server.target])

    told = json.loads(result.output)
    assert set(told) == set(v1.Explanation.DESCRIPTOR.fields_by_name)
    assert (told["decode_worker"], told["prefill_worker"], told["reason"]) == (
        "fake-decode",
        "fake-prefill",
        "sooner_there",
    )
    assert told["prefill"]["candidates"][0]["parts"] == {"compute_ms": 500.0, "handoff_ms": 10.0}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_gateway_that_is_not_there_or_has_no_worker_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_there: bool
) -> None:
    with FakeServer(Answer(error=Unavailable("no decode worker takes requests now"))) as server:
        target = server.target if is_there else "127.0.0.1:1"
        monkeypatch.setattr(sys, "argv", ["kvferry", "explain", "hello", "--target", target])
        monkeypatch.setattr(cli, "errors", Console(stderr=True, width=500))

        with pytest.raises(SystemExit) as exit_:
            cli.main()

    captured = capsys.readouterr()
    assert exit_.value.code == 1
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: the gateway at {target}: ")
    assert ("no decode worker takes requests now" if is_there else "Connection refused") in captured.err
