"""A finished run keeps what explains it and lets go of what only a restart would read."""

from pathlib import Path

from swarm.simulate.local.run import delete_heavy


def fill(path: Path, num_bytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    return path


def test_checkpoints_and_weights_go_and_what_explains_the_run_stays(tmp_path: Path) -> None:
    ada, bell = tmp_path / "ada", tmp_path / "bell"
    fill(ada / "checkpoints" / "checkpoint-00000003" / "tensors.safetensors", 1000)
    fill(bell / "weights" / "chunks" / "ab", 20)
    fill(bell / "engine" / "vllm.log", 3)
    kept = [fill(ada / name, 7) for name in ("events.jsonl", "groups.sqlite", "node.toml")]
    elsewhere = fill(tmp_path / "elsewhere" / "tensors.safetensors", 50)
    (ada / "weights").symlink_to(elsewhere.parent)
    assert delete_heavy([ada, bell, tmp_path / "never_started"]) == 1023
    assert all(path.is_file() for path in (*kept, elsewhere))
    assert sorted(path.name for path in bell.iterdir()) == []
    assert not (ada / "checkpoints").exists()
