"""What can be made to go wrong, where, and how a plan of faults is written.

A plan is `point:action[=value][*times][+skip][@pool]`, separated by commas: `handoff.close:drop*1+2@prefill` lets two
Closes pass at each worker of pool prefill, loses the third, and lets the rest pass.
"""

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum

from messages.errors import ConfigError


class Action(StrEnum):
    """What can happen at a point."""

    CORRUPT = "corrupt"
    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    ERROR = "error"
    KILL = "kill"
    PREEMPT = "preempt"
    SKEW = "skew"
    THROTTLE = "throttle"


VALUE_UNITS = {Action.DELAY: "seconds", Action.SKEW: "seconds", Action.THROTTLE: "GB/s"}
"""Actions that need a value, and its unit; the others take none."""

_CALL = (Action.DELAY, Action.DROP, Action.DUPLICATE, Action.ERROR, Action.KILL)
_ASK = (Action.DELAY, Action.DROP, Action.ERROR)
_STEP = (Action.DELAY, Action.ERROR, Action.KILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoint:
    """A place in the code where something can be made to go wrong."""

    name: str
    actions: tuple[Action, ...]
    place: str
    """Where it is and what passes there, in words."""


def _asking_point(name: str, place: str) -> FaultPoint:
    return FaultPoint(name=name, actions=_ASK, place=f"{place}; drop loses the answer")


FAULT_POINTS: dict[str, FaultPoint] = {
    point.name: point
    for point in (
        FaultPoint(
            name="engine.preempt_once",
            actions=(Action.PREEMPT,),
            place="every request that may be preempted is, once, at its third token",
        ),
        FaultPoint(name="engine.prefill_chunk", actions=_STEP, place="a step that computes tokens of prompts"),
        FaultPoint(name="engine.decode_step", actions=_STEP, place="a step that computes no prompt"),
        FaultPoint(
            name="worker.message",
            actions=(Action.DELAY, Action.DROP, Action.DUPLICATE),
            place="a message from a gateway, as the worker takes it",
        ),
        FaultPoint(
            name="worker.event",
            actions=(Action.DELAY, Action.DROP, Action.DUPLICATE, Action.KILL),
            place="the events of one engine step, as the worker sends them to a gateway",
        ),
        FaultPoint(name="handoff.open", actions=_CALL, place="a reader's Open at the owner of the blocks"),
        FaultPoint(name="handoff.heartbeat", actions=_CALL, place="a reader's heartbeat at the owner"),
        FaultPoint(name="handoff.close", actions=_CALL, place="a reader's Close at the owner"),
        FaultPoint(name="handoff.release", actions=_CALL, place="a reader's Release at the owner"),
        FaultPoint(
            name="transfer.read",
            actions=(Action.CORRUPT, Action.DELAY, Action.ERROR, Action.KILL, Action.THROTTLE),
            place="a read of blocks at the reader; error and corrupt come after the bytes",
        ),
        FaultPoint(name="clock", actions=(Action.SKEW,), place="a look at the clock of the owner's leases"),
        _asking_point("registry.register", "a worker shows itself, or renews its lease"),
        _asking_point("registry.unregister", "a worker leaves"),
        _asking_point("registry.workers", "the table of live workers is read"),
        _asking_point("registry.write", "a numbered batch of what a worker holds and no longer holds"),
        _asking_point("registry.lookup", "the holders of a prefix are looked up"),
        _asking_point("registry.tend", "a part of the cleaning up"),
        _asking_point("ledger.reserve", "a gateway chooses a worker and reserves on it"),
        _asking_point("ledger.release", "a gateway gives a reservation back"),
        _asking_point("ledger.forget", "a gateway ends the reservations of a dead worker"),
        _asking_point("ledger.pending", "the reservations of a pool are read"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One action at one point, on the passes `skip` < n <= `skip` + `times`."""

    point: str
    action: Action
    value: float | None = None
    """Seconds of delay or skew, GB/s of a throttle."""
    times: int | None = None
    """None: for ever."""
    skip: int = 0
    pool: str | None = None
    """Only workers of this pool; None: every process."""

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value:g}"
        times = "" if self.times is None else f"*{self.times}"
        skip = f"+{self.skip}" if self.skip else ""
        return f"{self.point}:{self.action}{value}{times}{skip}{'' if self.pool is None else f'@{self.pool}'}"


_SYNTAX = re.compile(
    r"(?P<point>[^:=*+@\s]+)(?::(?P<action>[^:=*+@\s]+)(?:=(?P<value>-?\d+(?:\.\d*)?|-?\.\d+))?)?"
    r"(?:\*(?P<times>\d+))?(?:\+(?P<skip>\d+))?(?:@(?P<pool>[a-z][a-z0-9-]*))?"
)
SYNTAX = "point:action[=value][*times][+skip][@pool]"


def parse_faults(text: str) -> tuple[FaultRule, ...]:
    """Read a plan, rules separated by commas; empty text is no fault.

    Raises:
        ConfigError: A rule is malformed, or names no point or action that exists; says which comes nearest.
    """
    return tuple(_parse_rule(rule.strip()) for rule in text.split(",") if rule.strip())


def _parse_rule(text: str) -> FaultRule:
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise ConfigError(f'fault "{text}" is not of the form {SYNTAX}')
    point = FAULT_POINTS.get(match["point"])
    if point is None:
        raise ConfigError(f'fault "{text}": no point is called "{match["point"]}"{_nearest(match["point"])}')
    action = _action(text, point, match["action"])
    unit = VALUE_UNITS.get(action)
    if (unit is None) != (match["value"] is None):
        wanted = "takes no value" if unit is None else f"needs a value in {unit}"
        raise ConfigError(f'fault "{text}": {action} {wanted}')
    value = None if match["value"] is None else float(match["value"])
    if value is not None and action is not Action.SKEW and value <= 0:
        raise ConfigError(f'fault "{text}": the {unit} of {action} must be more than 0')
    return FaultRule(
        point=point.name,
        action=action,
        value=value,
        times=None if match["times"] is None else int(match["times"]),
        skip=int(match["skip"] or 0),
        pool=match["pool"],
    )


def _action(text: str, point: FaultPoint, name: str | None) -> Action:
    if name is None and len(point.actions) == 1:
        return point.actions[0]
    if name not in point.actions:
        known = ", ".join(point.actions)
        near = difflib.get_close_matches(name or "", point.actions, n=1, cutoff=0.0 if name else 1.0)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        asked = "needs an action" if name is None else f'does not know "{name}"'
        raise ConfigError(f'fault "{text}": {point.name} {asked}, it knows {known}{hint}')
    return Action(name)


def _nearest(name: str) -> str:
    (near,) = difflib.get_close_matches(name, FAULT_POINTS, n=1, cutoff=0.0)
    return f'; did you mean "{near}"? `kvferry faults` lists them all'
