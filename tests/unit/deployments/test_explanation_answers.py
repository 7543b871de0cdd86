"""Every part of an explanation reaches the client, as a message and as JSON."""

import json
from typing import Any, get_args

import pytest

from cluster.explanation import CandidateScore, PlacementExplanation, StageExplanation
from cluster.placement import LocalReason, RemoteReason
from deployments.gateway.explanation_answers import explanation_message, explanation_object
from deployments.service import Explanation
from kvferry.v1 import inference_pb2 as v1

REASONS = [*get_args(LocalReason), *get_args(RemoteReason)]


def candidate(worker_id: str, rank: int | None, **fields: Any) -> CandidateScore:
    given: dict[str, Any] = {
        "worker_id": worker_id,
        "pool": "a",
        "is_allowed": rank is not None,
        "rank": rank,
        "cost": 1.5,
        "matched_tokens": 32,
        "remaining_tokens": 68,
        "parts": {"z_ms": 1.0, "a_ms": 0.5},
    }
    return CandidateScore(**(given | fields))


def explanation(**fields: Any) -> Explanation:
    decode = StageExplanation(
        stage="decode", policy="predicted_latency", candidates=(candidate("d2", 1), candidate("d1", 0))
    )
    prefill = StageExplanation(
        stage="prefill", policy="predicted_latency", candidates=(candidate("p1", 0), candidate("p2", None))
    )
    given: dict[str, Any] = {
        "decode": decode,
        "prefill": prefill,
        "reason": "sooner_there",
        "local_ms": 20.0,
        "remote_ms": 10.5,
    }
    return Explanation(prompt_tokens=100, placement=PlacementExplanation(**(given | fields)))


def test_a_message_has_every_field_and_keeps_the_order_of_candidates_and_parts() -> None:
    message = explanation_message(explanation())

    assert {field.name for field, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name)
    assert (message.prompt_tokens, message.decode_worker, message.prefill_worker) == (100, "d1", "p1")
    assert (message.reason, message.local_ms, message.remote_ms) == (v1.PREFILL_REASON_SOONER_THERE, 20.0, 10.5)
    assert (message.decode.policy, message.prefill.policy) == ("predicted_latency", "predicted_latency")
    assert [each.worker for each in message.decode.candidates] == ["d2", "d1"]
    excluded = message.prefill.candidates[1]
    assert (excluded.is_allowed, excluded.HasField("rank")) == (False, False)
    assert message.decode.candidates[0] == v1.CandidateScore(
        worker="d2",
        pool="a",
        is_allowed=True,
        rank=1,
        cost=1.5,
        matched_tokens=32,
        remaining_tokens=68,
        parts=[v1.CostPart(name="z_ms", value=1.0), v1.CostPart(name="a_ms", value=0.5)],
    )


def test_json_has_the_names_of_the_message() -> None:
    made: Any = json.loads(json.dumps(explanation_object(explanation())))

    assert set(made) == set(v1.Explanation.DESCRIPTOR.fields_by_name)
    assert set(made["decode"]) == set(v1.StageExplanation.DESCRIPTOR.fields_by_name)
    assert set(made["decode"]["candidates"][0]) == set(v1.CandidateScore.DESCRIPTOR.fields_by_name)
    assert (made["decode_worker"], made["prefill_worker"], made["reason"]) == ("d1", "p1", "sooner_there")
    assert made["prefill"]["candidates"][1]["rank"] is None
    assert list(made["decode"]["candidates"][0]["parts"].items()) == [("z_ms", 1.0), ("a_ms", 0.5)]


def test_what_was_not_compared_is_absent() -> None:
    short = explanation(prefill=None, reason="few_tokens", local_ms=None, remote_ms=None)

    message, made = explanation_message(short), explanation_object(short)

    absent = ("prefill", "prefill_worker", "local_ms", "remote_ms")
    assert [name for name in absent if message.HasField(name)] == []
    assert [made[name] for name in absent] == [None] * 4


def test_who_was_compared_but_not_needed_is_not_chosen() -> None:
    stage = StageExplanation(stage="prefill", policy="lmetric", candidates=(candidate("p1", None, is_allowed=True),))

    message = explanation_message(explanation(prefill=stage, reason="sooner_here"))

    assert not message.HasField("prefill_worker")
    assert [each.worker for each in message.prefill.candidates] == ["p1"]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_its_own_number_on_the_wire(reason: str) -> None:
    message = explanation_message(explanation(reason=reason))

    assert v1.PrefillReason.Name(message.reason) == f"PREFILL_REASON_{reason.upper()}"
