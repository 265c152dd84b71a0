"""Asks a package index which pins of constraints.txt have no wheel for machines that we do not have.

python .ci/wheels.py [UV]      a table in Markdown, in about 15 minutes; UV: the command, of `pip install uv`

Invariant: only metadata is read (uv resolves; nothing is installed, and no wheel is downloaded), of one index alone: no
folder or index that this machine's configuration of pip or uv names is looked at.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

INDEX: Final = "https://pypi.org/simple"
PINS: Final = Path(__file__).parents[1] / "constraints.txt"
PYTHONS: Final = ("3.11", "3.12", "3.13")
PATCH: Final = 9  # of each: pymdown-extensions, of `make site` alone, wants 3.11.5 or newer
# glibc 2.28 is that of Debian 10, RHEL 8 and Ubuntu 20.04; macOS 14 is the oldest that torch has wheels for.
PLATFORMS: Final = {
    "Linux x86-64, WSL 2": "x86_64-manylinux_2_28",
    "Linux arm64": "aarch64-manylinux_2_28",
    "macOS 14 arm64": "aarch64-apple-darwin",
    "macOS 14 x86-64": "x86_64-apple-darwin",
}
_REFUSED: Final = re.compile(r"Because ([\w.-]+)==(\S+) has no (?:usable )?wheels")


def without_wheel(uv: str, pins: set[str], platform: str, python: str) -> set[str]:
    """Pins (name==version) of `pins` that have no wheel for a platform and a Python.

    Raises:
        RuntimeError: uv says something else, such as that the index does not answer.
    """
    lacking = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pins.txt"
        while True:  # uv names one at a time
            path.write_text("\n".join(sorted(pins - lacking)))
            command = [uv, "pip", "compile", str(path), "--no-deps", "--only-binary=:all:", "--no-config", "--quiet"]
            command += [f"--python-platform={platform}", f"--python-version={python}.{PATCH}"]
            command += [f"--default-index={INDEX}"]
            environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
            environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"
            asked = subprocess.run(command, env=environment, capture_output=True, text=True)
            if asked.returncode == 0:
                return lacking
            found = _REFUSED.search(" ".join(asked.stderr.split()))
            named = {pin for pin in pins - lacking if found and _normal(pin) == _normal("==".join(found.groups()))}
            if not named:
                raise RuntimeError(f"{' '.join(command)}: {asked.stderr}")
            lacking |= named


def _normal(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin).lower()


def main() -> None:
    """Prints one row for each pin that lacks a wheel anywhere: for which Pythons, by platform."""
    uv = sys.argv[1] if len(sys.argv) > 1 else "uv"
    pins = {line.strip() for line in PINS.read_text().splitlines() if "==" in line and not line.startswith("#")}
    lacking = {
        (name, python): without_wheel(uv, pins, platform, python)
        for name, platform in PLATFORMS.items()
        for python in PYTHONS
    }
    print(f"{len(pins)} pins of {PINS.name}, asked of {INDEX} on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}:\n")
    print(f"| no wheel of | {' | '.join(PLATFORMS)} |\n|---|{'---|' * len(PLATFORMS)}")
    for pin in sorted(set[str]().union(*lacking.values()), key=str.lower):
        cells = [[python for python in PYTHONS if pin in lacking[name, python]] for name in PLATFORMS]
        words = [
            "none" if len(cell) == len(PYTHONS) else f"none for {', '.join(cell)}" if cell else "wheel"
            for cell in cells
        ]
        print(f"| {pin} | {' | '.join(words)} |")


if __name__ == "__main__":
    main()
