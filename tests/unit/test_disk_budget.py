"""One number for the disk: how it is split, and what does not fit in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.disk_budget import LEAST_GROUPS_BYTES, disk_budget, disk_line, takes_line, within_budget
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.telemetry.event_log import KEPT_OLD_FILES, MAX_FILE_BYTES

LOGS = (1 + KEPT_OLD_FILES) * MAX_FILE_BYTES
MB, GB = 10**6, 10**9
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def config(max_bytes: int = 0, **changes: Any) -> NodeConfig:
    return NodeConfig.model_validate({"model": {"source": "tiny"}, "disk": {"max_bytes": max_bytes}, **changes})


@pytest.mark.parametrize("max_bytes", [400 * MB, 500 * MB, GB, 2 * GB, 10 * GB, 100 * GB])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": {"publish": True}},
        {"roles": ["generator"]},
        {"evaluation": {"keep_best": True}},
        {"roles": ["generator"], "engine": {"kind": "vllm"}},
    ],
)
def test_the_parts_never_exceed_the_number_and_only_lower_what_the_configuration_allows(
    max_bytes: int, changes: dict[str, Any]
) -> None:
    asked = config(max_bytes, **changes)
    budget, changed = disk_budget(asked), within_budget(asked)
    assert budget is not None and budget.total <= max_bytes
    assert LEAST_GROUPS_BYTES <= changed.exchange.store_bytes <= budget.groups / 1.2
    assert changed.exchange.store_bytes <= asked.exchange.store_bytes
    assert changed.weights.store_bytes <= asked.weights.store_bytes
    holds_weights = asked.weights.publish or "trainer" not in asked.roles
    assert (budget.weights > 0) == holds_weights
    assert (budget.checkpoints > 0) == ("trainer" in asked.roles)
    if max_bytes >= 20 * GB:
        assert within_budget(asked) == asked


def test_a_tight_disk_keeps_one_checkpoint_less_before_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding="ascii")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="ascii")
    data: dict[str, Any] = {"model": {"source": str(tmp_path)}}
    roomy = disk_budget(config(**data))
    assert roomy is not None
    checkpoint = roomy.checkpoints // 3
    assert checkpoint == 12 * 134_515_008
    tight = within_budget(config(6 * GB, **data))
    assert tight.disk.kept_checkpoints == 2
    tight = within_budget(config(4 * GB, **data))
    assert tight.disk.kept_checkpoints == 1
    with pytest.raises(ConfigError, match=r"disk.max_bytes: 3.0 GB is too little for a checkpoint of 1.6 GB") as raised:
        within_budget(config(3 * GB, **data))
    least = int(str(raised.value).split("set ")[1].split()[0])
    assert within_budget(config(least, **data)).disk.kept_checkpoints == 1, "what the message names is enough"
    with pytest.raises(ConfigError):
        within_budget(config(least - 1, **data))
    assert within_budget(config(least, model={**data["model"], "lora_rank": 8})).disk.kept_checkpoints == 2


def test_the_parts_are_said_and_so_is_what_a_node_takes() -> None:
    line = disk_line(config(GB, weights={"publish": True}))
    assert line.startswith("disk: at most") and "of disk.max_bytes 1.0 GB" in line
    assert all(part in line for part in ("checkpoints, 2 and one that is written", "weights", "groups", "events"))
    exchange = {"max_upload_bytes_per_s": 2 * MB}
    taken = takes_line(config(GB, num_threads=3, niceness=10, exchange=exchange, environments=[]))
    for part in ("3 threads to learn and as many to generate", "nice 10", "memory about", "disk at most", "2.0 MB/s"):
        assert part in taken, taken
    assert "no network" in takes_line(config(directory={"kind": "none"}))
    assert "upload without limit" in takes_line(config())
