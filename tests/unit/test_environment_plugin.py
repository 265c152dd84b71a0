"""An environment of the user's own: the example of CONTRIBUTING.md, loaded, scored in the sandbox and mixed."""

import importlib
import py_compile
import re
import shutil
import sys
from pathlib import Path

import pytest

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.curriculum import TaskMixture
from swarm.environments.load import build_environment, build_environments
from swarm.environments.replay import answer_reward
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError
from swarm.plugins import code_version, package_digest
from swarm.testing.builders import answers

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
TAG = sys.implementation.cache_tag  # of compiled files, such as cpython-311


def plugin(folder: Path, code: str, name: str = "Sums") -> EnvironmentConfig:
    (folder / "my_sums.py").write_text(code, encoding="utf-8")
    return EnvironmentConfig(name="sums", kind="plugin", dataset=f"{folder / 'my_sums.py'}:{name}", num_tasks=100)


@pytest.fixture
def documented(tmp_path: Path) -> EnvironmentConfig:
    """The Python example of the page, as it stands there."""
    section = CONTRIBUTING.read_text(encoding="utf-8").split("## Adding an environment")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return plugin(tmp_path, code)


def test_the_documented_example_asks_and_judges(documented: EnvironmentConfig) -> None:
    sums = build_environment(documented)
    assert sums.reference(12) == "3" and sums.task(12).messages[-1].content == "1+2="
    assert answer_reward(sums, 12, " 3\n") == 1.0 and answer_reward(sums, 12, "4") == 0.0
    with pytest.raises(LookupError, match=r"0\.\.99"):
        sums.task(100)


def test_it_takes_part_in_the_training_mixture(documented: EnvironmentConfig) -> None:
    mixture = TaskMixture(build_environments([documented]), {}, seed=0)
    assert {task.env for task in mixture.tasks(0, 20)} == {"sums"}


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")
async def test_it_is_scored_in_the_sandbox(documented: EnvironmentConfig) -> None:
    async with SandboxVerifier((documented,), SandboxConfig()) as verifier:
        verdict = await verifier.verify("sums", 12, answers("3", "5"))
    assert verdict.rewards.tolist() == [1.0, 0.0] and verdict.verifier.startswith("sums/1 ")


PLAIN = """
from swarm.episode import Message, Transition
from swarm.types import Task

class PlainEpisode:
    def __init__(self, right):
        self.right = right
    def step(self, action):
        return Transition(is_end=True, rewards={"outcome": float(action.text == self.right)})

class Plain:
    verifier = "plain/1"
    def __init__(self, config):
        self.name, self.num_tasks, self.max_turns = config.name, 3, 1
    def task(self, task_id):
        return Task(env=self.name, task_id=task_id, messages=(Message(role="user", content=str(task_id)),))
    def episode(self, task_id):
        return PlainEpisode(str(task_id))
    def reference(self, task_id):
        return str(task_id)
"""


def test_a_class_that_only_implements_the_protocol_is_enough(tmp_path: Path) -> None:
    assert answer_reward(build_environment(plugin(tmp_path, PLAIN, "Plain")), 2, "2") == 1.0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("Sums = 3", "is not a class"),
        ("def Sums(config): ...", "is not a class"),
        ("class Sums: ...", "only argument"),
        ("class Sums:\n  def __init__(self, config): self.name = config.name", "has no verifier, num_tasks, max_turns"),
        (PLAIN.replace("class Plain:", "class Sums:").replace("config.name, 3", "'other', 3"), "config.name"),
        (PLAIN.replace("class Plain:", "class Sums:").replace("3, 1", "3, 2"), "max_turns is 1, and .max_turns 2"),
        ("class Sums:\n  def __init__(self, config): raise ValueError('no data')", "ValueError: no data"),
        ("class A:\n  __module__ = 'openenv.core'\nclass Sums(A): ...", "is an Environment of OpenEnv: .* wrap it"),
    ],
)
def test_a_plugin_that_cannot_work_is_refused_with_the_fix(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_environment(plugin(tmp_path, code))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers two environments, one of which cannot be imported."""
    (tmp_path / "offered_sums.py").write_text(PLAIN, encoding="utf-8")
    folder = tmp_path / "offered-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n", encoding="utf-8")
    (folder / "RECORD").write_text(
        "offered_sums.py,,\noffered-1.0.dist-info/METADATA,,\noffered-1.0.dist-info/entry_points.txt,,\n"
        f"offered-1.0.dist-info/RECORD,,\n__pycache__/offered_sums.{TAG}.pyc,,\n../../bin/offered,,\n",
        encoding="utf-8",
    )
    offers = "[swarm.environments]\nplain = offered_sums:Plain\nbroken = offered_sums:Missing\n"
    (folder / "entry_points.txt").write_text(offers, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_a_package_offers_environments_by_name() -> None:
    config = EnvironmentConfig(name="sums", kind="plugin", dataset="plain")
    assert answer_reward(build_environment(config), 2, "2") == 1.0
    with pytest.raises(ConfigError, match="Missing"):
        build_environment(config.model_copy(update={"dataset": "broken"}))
    with pytest.raises(ConfigError, match=r"'other'.*installed: .*plain.*install its package"):
        build_environment(config.model_copy(update={"dataset": "other"}))


@pytest.mark.usefixtures("installed")
def test_a_package_with_other_files_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    package, digest = package_digest("swarm.environments", "plain")
    assert package == "offered 1.0"
    config = EnvironmentConfig(name="sums", kind="plugin", dataset="plain", digest=digest)
    assert answer_reward(build_environment(config), 2, "2") == 1.0
    sys.modules.pop("offered_sums")
    (tmp_path / "offered_sums.py").write_text(PLAIN + "raise SystemExit\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"offered 1.0 has digest [0-9a-f]{{64}}, the run asks for {digest}"):
        build_environment(config)
    with pytest.raises(ConfigError, match="name its entry point"):
        build_environment(config.model_copy(update={"dataset": "offered_sums:Plain"}))
    (tmp_path / "offered-1.0.dist-info" / "RECORD").unlink()
    with pytest.raises(ConfigError, match="install a wheel"):
        build_environment(config)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a folder of two modules and its compiled files, as pip installs it."""
    package, records = tmp_path / "offering", tmp_path / "offering-1.0.dist-info"
    (package / "inner").mkdir(parents=True)
    records.mkdir()
    (records / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (records / "entry_points.txt").write_text("[swarm.environments]\nsums = offering:Plain\n")
    (records / "INSTALLER").write_text("pip\n")
    names = ["__init__.py", "inner/rules.py"]
    for name in names:
        (package / name).write_text(PLAIN)
        py_compile.compile(str(package / name))
    listed = [f"offering/{name},sha256=x,1" for name in names]
    listed += [f"offering-1.0.dist-info/{name},," for name in ("METADATA", "entry_points.txt", "INSTALLER", "RECORD")]
    (records / "RECORD").write_text("\n".join(listed) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def list_file(folder: Path, line: str) -> None:
    record = folder.parent / "offering-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + line + "\n")


def digest_now() -> str:
    return package_digest("swarm.environments", "sums")[1]


def test_the_digest_is_that_of_the_wheel_whatever_the_installer_wrote(folder: Path) -> None:
    before = digest_now()
    (folder.parent / "offering-1.0.dist-info" / "INSTALLER").write_text("uv\n")
    shutil.rmtree(folder / "__pycache__")
    assert digest_now() == before
    (folder.parent / "offering-1.0.dist-info" / "LICENSE").write_text("any")
    list_file(folder, "offering-1.0.dist-info/LICENSE,,")
    assert digest_now() != before


def test_code_that_no_list_of_sources_shows_is_refused_by_name(folder: Path) -> None:
    digest_now()
    for name in ("tuned.py", "data.txt", "inner/tuned.so", "other/tuned.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PLAIN)
        hidden = Path("offering") / (name if name != "other/tuned.py" else "other")
        with pytest.raises(ConfigError, match=f"offering: {hidden} is code that its sources do not show"):
            digest_now()
        path.unlink()
        if name == "other/tuned.py":
            path.parent.rmdir()
    digest_now()


def test_a_compiled_file_without_its_source_or_that_ignores_it_is_refused(folder: Path) -> None:
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(folder / "inner" / "rules.py"), invalidation_mode=unchecked)
    with pytest.raises(ConfigError, match=r"offering/inner/__pycache__/rules.*pyc is code"):
        digest_now()
    py_compile.compile(str(folder / "inner" / "rules.py"))
    digest_now()
    alone = folder / "__pycache__" / f"tuned.{TAG}.pyc"
    alone.write_bytes(b"0" * 16)
    with pytest.raises(ConfigError, match=r"offering/__pycache__/tuned.*pyc is code"):
        digest_now()
    alone.unlink()
    record = folder.parent / "offering-1.0.dist-info" / "RECORD"
    honest = record.read_text()
    for listed in ("offering/tuned.pyc,", f"offering/inner/__pycache__/rules.{TAG}.pyc,sha256=x", "../tuned.py,"):
        list_file(folder, f"{listed},")
        path = folder.parent / listed.partition(",")[0]
        had = path.read_bytes() if path.exists() else None
        path.write_bytes(had or b"")  # Python 3.12 passes over what is listed and not there
        with pytest.raises(ConfigError, match=f"offering: {listed.partition(',')[0]} is code"):
            digest_now()
        record.write_text(honest)
        if had is None:
            path.unlink()
    digest_now()


@pytest.mark.parametrize("line", ["import offering_words", "from .rules import TEN", "from offering.rules import TEN"])
def test_the_release_of_what_a_file_imports_is_part_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The package of a module may have another name, and may be the one that the file itself is in."""
    package, records = tmp_path / "offering", tmp_path / "words.dist-info"
    package.mkdir()
    records.mkdir()
    (package / "__init__.py").write_text(f"{line}\n\n\nclass Rule:\n    pass\n")
    (package / "rules.py").write_text("TEN = 10\n")
    (tmp_path / "offering_words.py").write_text("")
    (records / "RECORD").write_text("offering/__init__.py,,\noffering_words.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: list[str] = []
    for release in ("1.0", "1.1", "1.0"):
        (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: words\nVersion: {release}\n")
        found.append(code_version(importlib.import_module("offering").Rule))
    sys.modules.pop("offering")
    assert found[0] != found[1] and found[0] == found[2]


@pytest.mark.parametrize(
    ("member", "value"), [("max_turns", '"4"'), ("max_turns", "0"), ("num_tasks", "2.5"), ("answer_cpu_s", '"slow"')]
)
def test_a_count_of_another_type_is_refused_in_a_sentence(tmp_path: Path, member: str, value: str) -> None:
    code = PLAIN + "\nclass Counted(Plain):\n    def __init__(self, config):\n        super().__init__(config)\n"
    with pytest.raises(ConfigError, match=rf"Counted\.{member} is .*, and must be a (whole )?number"):
        build_environment(plugin(tmp_path, code + f"        self.{member} = {value}\n", "Counted"))
