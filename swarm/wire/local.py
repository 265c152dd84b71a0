"""Draws, reports and verdicts between the agent and its own worker.

Invariant: the groups of a draw arrive exactly as drawn. Groups use the messages of the network, figures are JSON.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from swarm.episode import Message, outcomes_from_json, outcomes_to_json
from swarm.interfaces import Verdict
from swarm.types import (
    ApplyReport,
    Correction,
    Draw,
    DrawnGroup,
    EdgeReport,
    Evaluation,
    PolicyVersion,
    ScoredGroup,
    StepReport,
    Task,
)
from swarm.wire.rollout_groups import body_to_group, group_to_body
from swarm.wire.v1 import local_service_pb2 as pb

# The largest group that the configuration allows, with overhead.
MAX_LOCAL_MESSAGE_BYTES: Final = 65 * 2**20

Part = pb.DrawResponse | pb.RedrawResponse


# --- draws -------------------------------------------------------------------------------------


def draw_to_fields(draw: Draw) -> list[dict[str, Any]]:
    """Fields of a draw's messages: a header, then one message per group."""
    header: dict[str, Any] = {
        "step": draw.step,
        "num_zero_variance": draw.num_zero_variance,
        "num_groups": len(draw.groups),
        "source_weights": draw.source_weights,
    }
    return [header, *({"group": _drawn_to_message(drawn)} for drawn in draw.groups)]


def draw_from_parts(header: Part, groups: Sequence[Part]) -> Draw:
    """Builds a draw from its header and one message for each group."""
    return Draw(
        step=header.step,
        groups=tuple(_drawn_from_message(part.group) for part in groups),
        num_zero_variance=header.num_zero_variance,
        source_weights=dict(header.source_weights),
    )


def _drawn_to_message(drawn: DrawnGroup) -> pb.DrawnGroup:
    scored = drawn.scored
    return pb.DrawnGroup(
        digest=scored.digest,
        producer=scored.group.producer,
        body=group_to_body(scored.group),
        rewards=scored.rewards.astype("<f4").tobytes(),
        correction=scored.correction.value,
        is_made_here=scored.is_made_here,
        first_seen_s=scored.first_seen_s,
        size_bytes=scored.size_bytes,
        age_steps=drawn.age_steps,
        use=drawn.use,
        is_established=drawn.is_established,
        outcomes=outcomes_to_json(scored.outcomes) if scored.outcomes else b"",
    )


def _drawn_from_message(message: pb.DrawnGroup) -> DrawnGroup:
    scored = ScoredGroup(
        digest=message.digest,
        group=body_to_group(message.body, message.producer),
        rewards=np.frombuffer(message.rewards, dtype="<f4").astype(np.float32),
        correction=Correction(message.correction),
        is_made_here=message.is_made_here,
        first_seen_s=message.first_seen_s,
        size_bytes=message.size_bytes,
        outcomes=outcomes_from_json(message.outcomes) if message.outcomes else (),
    )
    return DrawnGroup(
        scored=scored, age_steps=message.age_steps, use=message.use, is_established=message.is_established
    )


# --- figures -----------------------------------------------------------------------------------


def report_to_json(report: StepReport | ApplyReport) -> bytes:
    """Serialises a report as JSON, with the version's digest as hex."""
    fields = dataclasses.asdict(report)
    fields["version"]["digest"] = report.version.digest.hex()
    return json.dumps(fields).encode()


def step_report_from_json(data: bytes) -> StepReport:
    """Reads a step report from the JSON of `report_to_json`."""
    fields = _report_fields(data)
    edges = tuple(EdgeReport(**edge) for edge in fields.pop("edges"))
    return StepReport(edges=edges, ages_steps=tuple(fields.pop("ages_steps")), **fields)


def apply_report_from_json(data: bytes) -> ApplyReport:
    """Reads an apply report from the JSON of `report_to_json`."""
    return ApplyReport(**_report_fields(data))


def _report_fields(data: bytes) -> dict[str, Any]:
    fields = json.loads(data)
    digest = bytes.fromhex(fields["version"].pop("digest"))
    return {**fields, "version": PolicyVersion(**fields["version"], digest=digest)}


def evaluations_to_json(evaluations: Sequence[Evaluation]) -> bytes:
    """Serialises evaluations as a JSON list."""
    return json.dumps([dataclasses.asdict(evaluation) for evaluation in evaluations]).encode()


def evaluations_from_json(data: bytes) -> list[Evaluation]:
    """Inverse of `evaluations_to_json`."""
    found: list[dict[str, Any]] = json.loads(data)
    return [
        Evaluation(num_right=tuple(each.pop("num_right")), rewards=tuple(each.pop("rewards")), **each) for each in found
    ]


# --- verdicts ----------------------------------------------------------------------------------


def verdict_to_message(verdict: Verdict) -> pb.VerifyResponse:
    """Converts a verdict of the sandbox to its protobuf message."""
    return pb.VerifyResponse(
        task=json.dumps(dataclasses.asdict(verdict.task)).encode(),
        outcomes=outcomes_to_json(verdict.outcomes),
        verifier=verdict.verifier,
        reference=verdict.reference,
    )


def verdict_from_message(message: pb.VerifyResponse) -> Verdict:
    """Inverse of `verdict_to_message`."""
    fields = json.loads(message.task)
    messages = tuple(Message(**entry) for entry in fields.pop("messages"))
    return Verdict(
        task=Task(messages=messages, **fields),
        outcomes=outcomes_from_json(message.outcomes),
        verifier=message.verifier,
        reference=message.reference,
    )
