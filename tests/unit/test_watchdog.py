"""A process that hangs ends itself, and says where it hung."""

import subprocess
import sys
import time

# holds the interpreter's lock, so that no other thread of Python could do anything about it
HANG = "import ctypes; ctypes.PyDLL(None).sleep(60)"


def run(block: str, seconds: float) -> subprocess.CompletedProcess[str]:
    program = f"from swarm.generation.watchdog import at_most\nwith at_most({seconds}):\n    {block}\nprint('went on')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)


def test_a_call_that_never_comes_back_ends_the_process_and_is_named() -> None:
    began_s = time.monotonic()
    done = run(HANG, 0.5)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert time.monotonic() - began_s < 40
    assert "Timeout (0:00:00.500000)!" in done.stderr and 'File "<string>", line 3' in done.stderr


def test_a_call_that_comes_back_is_left_alone() -> None:
    done = run("pass", 0.5)
    assert done.returncode == 0 and "went on" in done.stdout
    late = "import time; time.sleep(0.1)"
    after = subprocess.run(
        [
            sys.executable,
            "-c",
            "from swarm.generation.watchdog import at_most\n"
            f"for _ in range(4):\n    with at_most(0.3):\n        {late}\n"
            "import time; time.sleep(0.6)\nprint('went on')",
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert after.returncode == 0 and "went on" in after.stdout, "the bound is of each block, and ends with it"
