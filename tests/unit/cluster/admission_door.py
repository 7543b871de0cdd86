"""An admission, and what it said of everybody."""

from cluster.admission import Admission, AdmissionRules, Ask, Changes
from messages.errors import ServingError
from tests.unit.cluster.pool_clock import Clock

RULES = AdmissionRules(max_requests=10, max_waiting_tokens=1000, max_wait_s=10.0, min_retry_s=0.5, max_retry_s=60.0)


class Door:
    """An admission with a budget of 100 tokens, and what became of everybody."""

    def __init__(self, rules: AdmissionRules = RULES, budget: int = 100) -> None:
        self.clock = Clock()
        self.admission = Admission(rules, budget, self.clock)
        self.begun: list[str] = []
        self.refused: dict[str, ServingError] = {}

    def note(self, changes: Changes) -> None:
        told = self.begun + list(self.refused)
        assert not {*changes.begun, *(refusal.request_id for refusal in changes.refused)} & set(told), "told twice"
        self.begun += changes.begun
        self.refused |= {refusal.request_id: refusal.error for refusal in changes.refused}

    def enter(self, request_id: str, tokens: int, priority: int = 0, timeout_s: float | None = None) -> None:
        ask = Ask(request_id=request_id, tokens=tokens, priority=priority, timeout_s=timeout_s)
        self.note(self.admission.enter(ask))

    def leave(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.note(self.admission.leave(request_id))

    def run(self, request_id: str, tokens: int, for_s: float) -> None:
        """Let a request run alone for so long, so that it is known how fast tokens come back."""
        self.enter(request_id, tokens)
        self.clock.now_s += for_s
        self.leave(request_id)

    def gauges(self) -> tuple[int, int, int, int]:
        door = self.admission
        return door.num_running, door.running_tokens, door.num_waiting, door.waiting_tokens
