"""Messages of older releases are read as what they meant; tests/recorded says how a release is recorded."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "recorded"
RELEASES = sorted(FOLDER.glob("*.json"))
sys.path.append(str(FOLDER))


def recorded() -> list[tuple[str, str]]:
    return [(release.stem, name) for release in RELEASES for name in json.loads(release.read_text())]


def test_the_first_release_is_kept_and_the_newest_has_every_kind_of_message() -> None:
    from recorded_messages import MESSAGES

    def kinds(release: str) -> set[str]:
        return {name for each, name in recorded() if each == release}

    assert "0.1.0" in {release.stem for release in RELEASES}
    assert kinds(RELEASES[-1].stem) == set(MESSAGES)
    assert all(kinds(release.stem) <= set(MESSAGES) for release in RELEASES)


@pytest.mark.parametrize(("release", "name"), recorded())
def test_a_message_of_an_older_release_means_what_it_meant(release: str, name: str) -> None:
    from recorded_messages import MESSAGES

    data = bytes.fromhex(json.loads((FOLDER / f"{release}.json").read_text())[name])
    # By their text: arrays within a dataclass have no equality, and floats are printed to the last bit.
    assert repr(MESSAGES[name].from_bytes(data)) == repr(MESSAGES[name].value)
