"""Ends of a side of `make test` that would never end by itself."""

import importlib.util
import threading
from collections import deque
from pathlib import Path
from types import ModuleType

import pytest

HANGS_AT_ITS_END = """
import threading

def test_passes():
    threading.Thread(target=threading.Event().wait).start()
"""
LEAVES_AN_ORPHAN = """
import subprocess, sys

def test_passes():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
"""


@pytest.fixture
def side_by_side() -> ModuleType:
    spec = importlib.util.spec_from_file_location("side_by_side", Path(__file__).parents[1] / "side_by_side.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_side_that_hangs_shows_where_and_fails(
    side_by_side: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(HANGS_AT_ITS_END)
    for silence_s in (3.0, 12.0, 60.0):  # a busy machine is silent while pytest itself starts
        side = side_by_side.Side("side", ("-c", "/dev/null"), deque(), threading.Event(), silence_s=silence_s)
        side.run([str(tmp_path)])
        said = capsys.readouterr().out
        if "1 passed" in said:
            break
    assert "1 passed" in said and f"nothing for {silence_s:.0f} s" in said and "threading.py" in said
    assert side.codes == [-6]


def test_a_process_left_behind_does_not_hold_a_side(
    side_by_side: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "LAST_WORDS_S", 0.1)
    (tmp_path / "test_it.py").write_text(LEAVES_AN_ORPHAN)
    side = side_by_side.Side("side", ("-c", "/dev/null", "-W", "ignore"), deque(), threading.Event())
    side.run([str(tmp_path)])
    assert "1 passed" in capsys.readouterr().out
    assert side.codes == [0]


def test_what_failed_is_told_again_at_the_end(
    side_by_side: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text("def test_fails():\n    assert 1 == 2, 'as it should'\n")
    monkeypatch.setattr(side_by_side, "sides_of", lambda _: ({"side": [str(tmp_path)]}, []))
    assert side_by_side.main("test", "-c", "/dev/null") == 1
    *_, failure, total = capsys.readouterr().out.splitlines()
    assert failure.startswith("FAILED ") and "test_fails" in failure and "as it should" in failure
    assert total == "0 passed, 1 failed, 0 skipped"
