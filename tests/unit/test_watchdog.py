"""A process that hangs ends itself, and says where it hung."""

import faulthandler
import subprocess
import sys

import pytest

from swarm.generation.vllm_adapter import at_most

# holds the interpreter's lock, so that no other thread of Python could do anything about it
HANG = "import ctypes; ctypes.PyDLL(None).sleep(60)"
IMPORT = "from swarm.generation.vllm_adapter import at_most\n"


def run(block: str, seconds: float) -> subprocess.CompletedProcess[str]:
    program = f"{IMPORT}with at_most({seconds}):\n    {block}\nprint('went on')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_call_that_never_comes_back_ends_the_process_and_is_named() -> None:
    done = run(HANG, 0.5)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "Timeout (0:00:00.500000)!" in done.stderr and 'File "<string>", line 3' in done.stderr


def test_a_call_that_comes_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: calls.append((seconds, exit)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    for _ in range(2):
        with at_most(0.5):
            calls.append("block")
    with pytest.raises(ValueError), at_most(0.5):
        raise ValueError
    bound = (0.5, True)  # of each block, and ends with it
    assert calls == [bound, "block", "cancelled"] * 2 + [bound, "cancelled"]
