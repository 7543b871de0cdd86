"""Stop strings in a stream: text is held back only while it may still become a stop.

The state is the longest end of the text that begins a stop, as in the string matching of Aho and Corasick (1975),
so the result does not depend on how the text was split. The stop that is complete first wins; of several that are
complete at the same character, the longest.
"""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string; the text given out never contains one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._longest_first = sorted(stops, key=len, reverse=True)
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop) + 1)}
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, if one did."""
        return self._matched

    def push(self, text: str, *, can_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what may be shown now and the stop that ended it, or None.

        After a match nothing is shown any more. A stop that becomes complete while `can_stop` is false is ordinary
        text; one that only begins then still ends the text later.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._prefixes:
            return text, None
        pending = self._held + text
        state = self._held
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = self._advance(state, character)
            stop = self._complete_stop(state) if can_stop else None
            if stop is not None:
                self._matched, self._held = stop, ""
                return pending[: end - len(stop)], stop
        self._held = state
        return pending[: len(pending) - len(state)], None

    def flush(self) -> str:
        """Return the text held back; the stream is over and no stop came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, state: str, character: str) -> str:
        state += character
        while state and state not in self._prefixes:
            state = state[1:]
        return state

    def _complete_stop(self, state: str) -> str | None:
        # Every stop that ends here is an end of `state`, because `state` is the longest candidate.
        return next((stop for stop in self._longest_first if state.endswith(stop)), None) if state else None
