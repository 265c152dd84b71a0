"""Every message that nodes of different releases exchange, as this release writes it, and the value that it stands for.

`python tests/recorded/recorded_messages.py` writes tests/recorded/<version>.json, once for each release;
tests/unit/test_recorded_messages.py reads the messages of all releases with the code of today.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm import __version__
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig, NodeConfig
from swarm.identity import DOMAIN_MANIFEST
from swarm.testing.builders import make_advert, make_group, make_identity
from swarm.types import (
    Advice,
    Canary,
    Credit,
    EdgeReport,
    NodeReport,
    PolicyVersion,
    RolloutGroup,
    SealedManifest,
    VersionSpan,
)
from swarm.weights.codec import Codec, decode, encode
from swarm.weights.manifest import Limits, Manifest, layout_digest, open_manifest, seal_manifest
from swarm.weights.tensors import HostTensor, TensorSpec
from swarm.wire.adverts import open_advert, seal_advert
from swarm.wire.envelopes import open_group, seal_group, sealed_from_bytes, sealed_to_bytes
from swarm.wire.reports import advice_from_message, advice_to_message, heartbeat_to_report, report_to_heartbeat
from swarm.wire.run_manifest import RunManifest, manifest_of
from swarm.wire.run_manifest import open_manifest as open_run_manifest
from swarm.wire.v1 import coordinator_service_pb2, exchange_service_pb2
from swarm.wire.weights import watched_from_message, watched_to_message

FOLDER = Path(__file__).parent
ADA, BELL = make_identity(0), make_identity(1)
HEAD = PolicyVersion(policy_id=ADA.node_id, step=12, digest=bytes(range(32)))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One kind of message."""

    value: Any
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]  # with every check that a receiver makes


def _group() -> RolloutGroup:
    """Two versions within an answer, log-probs that are no round numbers, byte lengths."""
    group = make_group(ADA.node_id, step=3, texts=("7", "8", "77", "7"))
    first, *others = group.rollouts
    assert first.trace is not None
    later = replace(first.trace.spans[0].version, step=4, digest=bytes(range(32)))
    trace = replace(
        first.trace,
        logprobs=np.array([-0.7310586, -1.5e-07], np.float32),
        byte_lengths=np.array([1, 0], np.int32),
        spans=(first.trace.spans[0], VersionSpan(start=1, version=later)),
    )
    return replace(group, rollouts=(replace(first, trace=trace), *others))


def _weights(change: int) -> dict[str, HostTensor]:
    """Three dtypes, NaN payloads and -0.0; `change` moves some of the bits."""
    bits = np.arange(600, dtype="<u2") * 97
    bits[::7] ^= change
    half = np.array([0x7FC1, 0x8000, 0x3F80 + change], "<u2")
    return {
        "a.weight": HostTensor(spec=TensorSpec(name="a.weight", dtype="bfloat16", shape=(20, 30)), bits=bits),
        "b.scale": HostTensor(spec=TensorSpec(name="b.scale", dtype="float16", shape=(3,)), bits=half),
        "c.step": HostTensor(spec=TensorSpec(name="c.step", dtype="int64", shape=()), bits=np.array([change], "<u8")),
    }


def _content(weights: dict[str, HostTensor]) -> dict[str, list[int]]:
    return {name: tensor.bits.tolist() for name, tensor in weights.items()}


def _decoded(data: bytes, base: dict[str, HostTensor] | None) -> dict[str, list[int]]:
    specs = tuple(tensor.spec for tensor in _weights(0).values())
    return {tensor.spec.name: tensor.bits.tolist() for tensor in decode(specs, [data], base)}


def _weights_manifest() -> Manifest:
    specs = tuple(tensor.spec for tensor in _weights(0).values())
    return Manifest(
        version=HEAD,
        base=PolicyVersion(policy_id=ADA.node_id, step=11, digest=bytes(32)),
        codec=Codec.DELTA,
        layout=layout_digest(specs),
        tensors=(),
        hashes=tuple(tensor.blake3() for tensor in _weights(1).values()),
        payload_bytes=1234,
        chunks=(bytes(range(1, 33)),),
        canaries=(Canary(token_ids=np.array([2, 3], np.int32), logprobs=np.array([np.nan, -0.7310586], np.float32)),),
    )


def _open_weights_manifest(data: bytes) -> Any:
    message = exchange_service_pb2.WatchResponse.FromString(data)
    sealed = watched_from_message(message)
    assert isinstance(sealed, SealedManifest)
    return open_manifest(sealed, ADA.node_id, Limits())


def _seal_run_manifest(manifest: RunManifest) -> bytes:
    data = manifest.to_bytes()
    return ADA.public_key + ADA.sign(DOMAIN_MANIFEST, data) + data


def _open_run_manifest(data: bytes) -> RunManifest:
    return open_run_manifest(data[96:], data[:32], data[32:96], ADA.node_id, "recorded").manifest


def _node() -> NodeConfig:
    env = EnvironmentConfig(name="reverse", kind="char", dataset="reverse")
    learner = LearnerConfig(learning_rate=1e-5)  # the default of that release
    tiny = ModelConfig(source="tiny")
    return NodeConfig(dir=Path("node"), run_id="recorded", model=tiny, learner=learner, environments=(env,))


MESSAGES: dict[str, Recorded] = {
    "rollout group": Recorded(
        value=_group(),
        to_bytes=lambda group: sealed_to_bytes(seal_group(group, ADA)),
        from_bytes=lambda data: open_group(sealed_from_bytes(data), 1 << 20),  # type: ignore[arg-type]
    ),
    "advert": Recorded(
        value=make_advert(ADA.node_id, head=HEAD, endpoints=("192.0.2.1:5001",), oldest_step=3, num_groups=77),
        to_bytes=lambda advert: seal_advert(advert, ADA),
        from_bytes=lambda data: open_advert(data, now_s=4e9 - 60),
    ),
    "heartbeat": Recorded(
        value=NodeReport(
            node_id=ADA.node_id,
            name="ada",
            roles=make_advert(ADA.node_id).roles,
            endpoints=("192.0.2.1:5001",),
            head=HEAD,
            tokens_per_s=12.5,
            reward_mean=0.25,
            num_local=8,
            num_external=4,
            num_refused=1,
            edges=(
                EdgeReport(
                    source=BELL.node_id,
                    num_groups=5,
                    age_mean_steps=1.5,
                    ess_share=0.75,
                    mismatch_kl=0.125,
                    reward_mean=0.5,
                ),
            ),
            evaluations={"reverse/held_out": 0.5},
        ),
        to_bytes=lambda report: report_to_heartbeat(report).SerializeToString(deterministic=True),
        from_bytes=lambda data: heartbeat_to_report(
            coordinator_service_pb2.HeartbeatRequest.FromString(data), ADA.node_id
        ),
    ),
    "advice": Recorded(
        value=Advice(max_age_steps=2, source_weights={BELL.node_id: 0.5}, state="tightened", lease_s=30.0),
        to_bytes=lambda advice: advice_to_message(advice).SerializeToString(deterministic=True),
        from_bytes=lambda data: advice_from_message(coordinator_service_pb2.HeartbeatResponse.FromString(data)),
    ),
    "credit": Recorded(
        value=Credit(head_step=12, granted=40),
        to_bytes=lambda credit: watched_to_message(credit).SerializeToString(deterministic=True),
        from_bytes=lambda data: watched_from_message(exchange_service_pb2.WatchResponse.FromString(data)),
    ),
    "weights manifest": Recorded(
        value=_weights_manifest(),
        to_bytes=lambda manifest: watched_to_message(seal_manifest(manifest, ADA)).SerializeToString(),
        from_bytes=_open_weights_manifest,
    ),
    "full weights": Recorded(
        value=_content(_weights(1)),
        to_bytes=lambda _: b"".join(encode(Codec.FULL, _weights(1), None)),
        from_bytes=lambda data: _decoded(data, None),
    ),
    "weight patch": Recorded(
        value=_content(_weights(1)),
        to_bytes=lambda _: b"".join(encode(Codec.DELTA, _weights(1), _weights(0))),
        from_bytes=lambda data: _decoded(data, _weights(0)),
    ),
    "run manifest": Recorded(
        value=manifest_of(_node(), "recorded", "", 1.5e9),
        to_bytes=_seal_run_manifest,
        from_bytes=_open_run_manifest,
    ),
}


if __name__ == "__main__":
    target = FOLDER / f"{__version__}.json"
    if target.exists():
        raise SystemExit(f"{target} is there: a recording is never made again; raise the version first")
    recorded = {name: message.to_bytes(message.value).hex() for name, message in MESSAGES.items()}
    target.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{target}: {len(recorded)} messages")
