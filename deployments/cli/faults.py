"""`kvferry faults`: what can be made to go wrong, how it is written, and what is planned in this environment."""

import json
from typing import Annotated

import typer

from deployments.cli.console import output
from deployments.config import FAULTS_VARIABLE, fault_rules
from messages.fault_plan import FAULT_POINTS, SYNTAX, VALUE_UNITS, Action, FaultRule

EXAMPLES = (
    ("transfer.read:throttle=0.25", "every read of blocks as slow as 0.25 GB/s"),
    ("handoff.close:drop*1+2@prefill", "the third Close at each worker of pool prefill is lost"),
    ("engine.decode_step:kill+9@decode,clock:skew=-5", "two rules"),
)


def faults(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the fault points and the plan that this environment gives to what is started from it; for tests."""
    rules = fault_rules()
    if as_json:
        output.print(json.dumps(_description(rules), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    lines = [f"{FAULTS_VARIABLE}={SYNTAX}[,...]", ""]
    for point in FAULT_POINTS.values():
        planned = [f"    PLANNED HERE: {rule}" for rule in rules if rule.point == point.name]
        lines += [f"{point.name}: {' '.join(map(_spelling, point.actions))}", f"    {point.place}", *planned]
    lines += ["", "Times and skip count the passes of one process. Examples:"]
    lines += [f"    {text}  ({meaning})" for text, meaning in EXAMPLES]
    output.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _spelling(action: Action) -> str:
    return f"{action}=<{VALUE_UNITS[action]}>" if action in VALUE_UNITS else str(action)


def _description(rules: tuple[FaultRule, ...]) -> dict[str, object]:
    return {
        "variable": FAULTS_VARIABLE,
        "syntax": SYNTAX,
        "points": [
            {
                "point": point.name,
                "actions": [{"action": action, "value": VALUE_UNITS.get(action)} for action in point.actions],
                "place": point.place,
                "planned": [str(rule) for rule in rules if rule.point == point.name],
            }
            for point in FAULT_POINTS.values()
        ],
    }
