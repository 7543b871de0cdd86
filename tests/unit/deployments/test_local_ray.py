"""What Serve says about a replica that did not start, as one line."""

import pytest

from deployments.local_ray import reason_in

TRACE = """A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:kvferry:decode.initialize_and_get_metadata()\x1b[39m (pid=1, ip=10.0.0.1)
  File "replica.py", line 1, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
KeyError: 'x'

The above exception was the direct cause of the following exception:

  File "worker.py", line 6, in __init__
    raise it
             ^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("messages.errors.ModelRefused: longrope is refused (a=1)", "longrope is refused (a=1)"),
        ("ValueError: wrong: thing", "ValueError: wrong: thing"),
        ("ValueError: first line\nsecond: line", "ValueError: first line"),
        ("a.b.Odd", "Odd: no message"),
    ],
)
def test_the_last_exception_is_the_reason(last: str, expected: str) -> None:
    assert reason_in(TRACE + last) == expected


def test_a_dead_process_gets_a_hint() -> None:
    assert "its process died" in reason_in("A replica failed to start with exception. Error:\nActorDiedError()")


def test_a_message_without_an_exception_is_given_as_it_is() -> None:
    assert reason_in("one\nno room in the cluster") == "no room in the cluster"
    assert reason_in("") == "no reason was given"
