"""What a worker says of itself in every heartbeat: load, counters, step times, and which requests it counts."""

from collections import deque

from cluster.admission_log import AdmissionLog
from cluster.step_time import StepTimeFit
from engine.events import LoadSnapshot, StepOutput
from messages.v1 import worker_pb2 as pb
from telemetry.metrics import WorkerCounter, WorkerGauge
from telemetry.step_record import StepRecord


class Vitals:
    """Written by the desk and the step thread, read by heartbeats."""

    def __init__(self) -> None:
        self._load: LoadSnapshot | None = None
        self._counters: dict[WorkerCounter | WorkerGauge, float] = dict.fromkeys(WorkerCounter, 0.0)
        self._times = StepTimeFit()
        self._admissions = AdmissionLog()
        self._submitted: deque[tuple[int, pb.Reservation]] = deque()
        """Reservations whose requests the engine has not taken in yet, by the engine's number."""

    @property
    def is_busy(self) -> bool:
        """Whether the engine had anything in its newest output, or has given none."""
        load = self._load
        return load is None or load.running + load.waiting + load.held > 0

    def count(self, counter: WorkerCounter, amount: float = 1.0) -> None:
        """Add to a counter."""
        self._counters[counter] += amount

    def set_count(self, counter: WorkerCounter | WorkerGauge, total: float) -> None:
        """Set a counter or a gauge that is kept elsewhere."""
        self._counters[counter] = total

    def note_step(self, record: StepRecord) -> None:
        """Learn from a step; called by the step thread."""
        self._times.add(record)

    def note_submission(self, number: int, reservation: pb.Reservation) -> None:
        """A request was given to the engine under a number; without a reservation there is nothing to say of it."""
        if reservation.issuer:
            self._submitted.append((number, reservation))

    def take(self, output: StepOutput) -> None:
        """Take over the newest load, and with it the requests that it counts."""
        self._load = output.load
        while self._submitted and self._submitted[0][0] <= output.num_submitted:
            reservation = self._submitted.popleft()[1]
            self._admissions.admit(reservation.issuer, reservation.sequence)

    def message(self) -> pb.Load | None:
        """The heartbeat, but for what only the desk knows; None before the engine has said anything."""
        load = self._load
        if load is None:
            return None
        totals = dict(load.counters)
        for name, value in self._counters.items():
            totals[name.value] = totals.get(name.value, 0.0) + value
        times = self._times.times()
        return pb.Load(
            groups=[
                pb.GroupLoad(
                    name=group.name,
                    total_blocks=group.total,
                    free_blocks=group.free,
                    cached_blocks=group.cached,
                    referenced_blocks=group.referenced,
                )
                for group in load.groups
            ],
            running=load.running,
            waiting=load.waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            context_tokens=load.context_tokens,
            counters=totals,
            times=pb.StepTimes(
                base_ms=times.base_ms,
                prefill_token_ms=times.prefill_token_ms,
                decode_token_ms=times.decode_token_ms,
                context_token_ms=times.context_token_ms,
            )
            if self._times.is_measured
            else None,
            admitted=[
                pb.Admitted(issuer=seen.issuer, through=seen.through, beyond=seen.beyond)
                for seen in self._admissions.admitted()
            ],
        )
