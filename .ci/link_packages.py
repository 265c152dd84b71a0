"""Links packages of this interpreter, with what they need, into another environment, which then has nothing else.

.venv/bin/python .ci/link_packages.py ENVIRONMENT PACKAGE...
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def with_needs(names: list[str]) -> set[str]:
    """Names of the packages and of all that they need where no extra is asked for."""
    found: set[str] = set()
    while names:
        name = re.sub("[-_.]+", "-", names.pop()).lower()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform
            continue
        if name not in found:
            found.add(name)
            wanted = map(Requirement, needs)
            names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def main() -> None:
    environment, *names = sys.argv[1:]
    (site,) = Path(environment).glob("lib/python*/site-packages")
    for name in with_needs(names):
        package = distribution(name)
        for top in {path.parts[0] for path in package.files or () if path.parts[0] != ".."}:
            link, target = site / top, Path(str(package.locate_file(top)))
            if top != "__pycache__" and not link.exists():
                link.symlink_to(target.absolute())


if __name__ == "__main__":
    main()
