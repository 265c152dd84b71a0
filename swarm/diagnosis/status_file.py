"""status.json of a node as others read it: bounded, and each value of the kind that its readers work with.

Invariant: a status that is returned ends no reader, whoever wrote it; keys of later releases stay as they are.
"""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.read_files import read_json
from swarm.types import JsonDict

MAX_BYTES: Final = 16 * 2**20  # of 256 followers and as many peers it has 100 KB
_Count = Annotated[int, Field(ge=-1, lt=2**63)]  # a step may be -1
_Time = Annotated[float, Field(ge=-1e11, le=1e11)]  # seconds; a year of four digits at the wall clock
_Pid = Annotated[int, Field(ge=0, lt=2**31)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _SinceStep(_Shape):
    num_put: _Count = 0
    num_with_signal: _Count = 0
    num_unscored: _Count = 0


class _Following(_Shape):
    policy: str
    candidates: list[str]
    trainers_without_weights: list[str]
    is_trainer_connected: bool
    served_step: _Count | None
    head_step: _Count = 0
    credit: _Count = 0
    last_error: str = ""


class _ReachedRelay(_Shape):
    node_id: str
    endpoint: str
    delay_ms: _Count


class _Reach(_Shape):
    kind: str
    host: str = ""
    detail: str = ""
    relays: list[_ReachedRelay] = []


class _Status(_Shape):
    at_s: _Time
    last_step_at_s: _Time | None = None
    node_id: str | None = None
    pid: _Pid | None = None
    step: _Count | None = None
    num_failures: _Count | None = None
    advice: str | None = None
    name: str | None = None
    run_id: str | None = None
    reward_mean: float | None = None
    started_at_s: _Time | None = None
    paused_since_s: _Time | None = None
    scoring_s: _Time | None = None
    written_bytes: _Count | None = None
    max_disk_bytes: _Count | None = None
    bytes_sent: _Count | None = None
    bytes_received: _Count | None = None
    replay_groups: _Count | None = None
    replay_bytes: _Count | None = None
    known_peers: _Count | None = None
    num_put: _Count | None = None
    num_admitted: _Count | None = None
    num_local_used: _Count | None = None
    num_external_used: _Count | None = None
    num_set_aside: _Count | None = None
    num_entry_refused: _Count | None = None
    num_events_lost: _Count | None = None
    tokens_generated: _Count = 0
    published_step: _Count | None = None
    endpoints: list[str] | None = None
    peers: list[str] = []
    dht: list[str] | None = None
    differs_from_run: list[Annotated[list[str], Field(min_length=3, max_length=3)]] | None = None
    newest_dial_error: str | None = None
    coordinator_refusal: str | None = None
    clock: str | None = None
    who_counts: str | None = None
    dials: dict[str, _Count] | None = None
    refusals: dict[str, _Count] = {}
    relayed: dict[str, _Count] | None = None
    newest_refusals: dict[str, Annotated[list[str], Field(min_length=2, max_length=2)]] | None = None
    evaluations: dict[str, float] = {}
    guard: dict[str, float] | None = None
    environments: dict[str, str] = {}
    standing: dict[str, str] = {}
    followers: dict[str, dict[str, _Count]] = {}
    own_since_step: _SinceStep | None = None
    following: _Following | None = None
    reach: _Reach | None = None
    is_coordinator_reachable: bool | None = None


def read_status_file(path: Path) -> JsonDict:
    """The object in a status.json (blocking).

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no status: no JSON, too long, or a value is missing or of another kind, which the text names.
    """
    found: Any = read_json(path, MAX_BYTES)
    try:
        _Status.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{key}: {first['msg']}"[:300]) from None
    return found
