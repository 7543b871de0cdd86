"""The text before the first stop, whatever the split, and no later than needed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopMatcher

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
TEXTS = st.text(alphabet="abcd", max_size=40)


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(part)[0] for part in parts)
    return shown + matcher.flush(), matcher.matched


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_shown_text_is_the_text_before_the_first_stop_however_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]

    shown, matched = run(parts, stops)

    assert (shown, matched) == cut_at_first_stop(text, stops)
    assert not any(stop in shown for stop in stops)


@given(text=TEXTS, stops=STOPS)
def test_only_text_that_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, matched = matcher.push(text)

    held = "" if matched is not None else text[len(shown) :]

    proper = [stop[:length] for stop in stops for length in range(1, len(stop))]
    longest = max((prefix for prefix in proper if text.endswith(prefix)), key=len, default="")
    assert matched is not None or held == longest


def test_after_a_stop_nothing_is_shown() -> None:
    matcher = StopMatcher(["END"])

    assert matcher.push("text E") == ("text ", None)
    assert matcher.push("ND more") == ("", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).push("text") == ("text", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_stop_that_completes_while_none_may_is_ordinary_text() -> None:
    matcher = StopMatcher(["ab"])

    assert matcher.push("xab", can_stop=False) == ("x", None)
    assert matcher.push("y") == ("aby", None)
    assert matcher.push("ab") == ("", "ab")


def test_a_stop_that_began_while_none_may_still_ends_the_text() -> None:
    matcher = StopMatcher(["abc"])

    assert matcher.push("xab", can_stop=False) == ("x", None)
    assert matcher.push("c") == ("", "abc")


@given(before=TEXTS, after=TEXTS, stops=STOPS)
def test_nothing_is_lost_or_doubled_where_stops_begin_to_count(before: str, after: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)

    shown = matcher.push(before, can_stop=False)[0] + matcher.push(after)[0]
    text = shown + (matcher.flush() if matcher.matched is None else matcher.matched)

    assert (before + after).startswith(text)
    assert matcher.matched is not None or text == before + after
    assert len(text) > len(before) or not after
