"""A command whose extra is not installed says which one it is."""

import subprocess
import sys

import pytest

from swarm.errors import missing_extra

WITHOUT = "import sys; sys.modules[{package!r}] = None; from {module} import app; app({arguments!r})"


@pytest.mark.parametrize(
    ("module", "arguments", "package", "extra"),
    [
        ("swarm.cli.main", ["chat", "tiny", "-m", "a"], "torch", "learn"),
        ("swarm.cli.main", ["serve", "tiny", "--listen", "127.0.0.1:0"], "starlette", "serve"),
        ("swarm.cli.main", ["recipes", "list"], "torch", "learn"),
    ],
)
def test_it_is_named_in_a_line(module: str, arguments: list[str], package: str, extra: str) -> None:
    program = WITHOUT.format(package=package, module=module, arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert package in ended.stderr and f"pip install 'swarm-trainer[{extra}]'" in ended.stderr


def test_a_package_that_no_extra_has_is_no_fault_of_the_installation() -> None:
    assert missing_extra(ModuleNotFoundError("no", name="my_own_helper")) is None
    found = missing_extra(ModuleNotFoundError("no", name="hivemind.dht"))
    assert found is not None and "swarm-trainer[dht]" in str(found)
