"""`swarm train`: from questions and a reward to a model, and what a user reads when there is nothing to learn from."""

import asyncio
import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from node.status import problems, read_status
from node.train import describe, prepare, train
from node.train_options import TrainOptions, resolve
from node.training_watch import TrainingWatch
from swarm.cli.main import app
from swarm.config import NODE_FILE
from swarm.errors import ConfigError
from swarm.events import GroupPut, GroupUnscored, PolicyEvaluated, StepMade, VersionPublished, WarmedUp
from swarm.learn.checkpoint import checkpoint_steps
from swarm.model.network import load_model
from swarm.telemetry import read_events
from swarm.testing.tiny_models import KINDS, model_source
from swarm.testing.trained_node import make_trained_node
from swarm.trained.export import export_model
from swarm.trained.model import load_trained
from swarm.trained.samples import SampleReader

RUN = CliRunner()


@pytest.fixture(autouse=True)
def other_tests_log_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.telemetry.setup_logging", lambda *_: None)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Questions whose answer is their letters in order, which the tiny model half knows."""
    source, path = random.Random(0), tmp_path / "letters.jsonl"
    words = ["".join(source.choice("abcdefgh") for _ in range(3)) for _ in range(300)]
    rows = [{"question": f"sort:{word}=", "answer": "".join(sorted(word))} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward_file(folder: Path, body: str) -> str:
    path = folder / f"reward_{abs(hash(body))}.py"
    path.write_text(f"def score(question, answer, reference):\n    {body}\n")
    return f"{path}:score"


def options_of(letters: Path, **changes: Any) -> TrainOptions:
    quick = ("evaluation.num_problems=4", "replay.local_groups=2", "generator.groups_per_batch=2")
    options = TrainOptions(directory=letters.parent / "run", model="tiny", data=letters, steps=3, overrides=quick)
    return replace(options, **changes)


@pytest.mark.parametrize("kind", KINDS)
async def test_it_trains_ends_and_goes_on_and_its_answers_can_be_read(letters: Path, kind: str) -> None:
    lines: list[str] = []
    reward = reward_file(letters.parent, "return sum(a == b for a, b in zip(answer, reference)) - 1.0")
    source = model_source(kind, letters.parent / "model")
    options = options_of(letters, reward=reward, reward_range=(-1.0, 2.0), model=source)
    await train(options, lines.append, is_patient=kind == "qwen3")  # random answers: some batches are all wrong
    directory = options.directory
    assert checkpoint_steps(directory / "checkpoints")[-1] == 3
    assert any("letters" in line or "300 problems" in line for line in lines)
    assert "worth 1" in "\n".join(lines), "the reference is worth the upper end of the range"
    assert lines[-1].startswith("next: swarm chat") and any("held out" in line for line in lines)
    status = read_status(directory)
    evaluated = [event for event in read_events(directory / "events.jsonl") if isinstance(event, PolicyEvaluated)]
    of_step = {event.step: event.accuracy for event in evaluated if event.split == "held_out"}
    best = load_trained(directory, "best").version
    assert best is not None and best.step == min(step for step in of_step if of_step[step] == max(of_step.values()))
    assert status["is_finished"] and problems(status, status["at_s"] + 1e6, 300.0, runs=False) == []
    for group in SampleReader(directory).newest(3, "own"):
        assert group.messages[-1].content.startswith("sort:") and len(group.samples) == 8
        for sample in group.samples:
            num_right = sum(a == b for a, b in zip(sample.actions[-1].strip(), group.reference, strict=False))
            assert sample.reward == pytest.approx(num_right / 3)
            assert "".join(token.text for token in sample.tokens).removesuffix("<end>") == sample.actions[-1]
            assert all(token.is_action and token.logprob is not None and token.logprob <= 0 for token in sample.tokens)
    before = load_trained(directory).version
    await train(TrainOptions(directory=directory), lines.append)  # all is done
    assert "nothing to do: all 3 steps were made; --steps N makes more" in lines[-1]
    assert load_trained(directory).version == before
    await train(TrainOptions(directory=directory, steps=5), lines.append)
    assert checkpoint_steps(directory / "checkpoints")[-1] == 5
    changed = "note: the questions or the reward of own are others than those"
    assert not any(changed in line for line in lines)
    records = await asyncio.to_thread(letters.read_text)
    await asyncio.to_thread(letters.write_text, records.replace("sort:", "sort: "))
    assert any(changed in line for line in await describe(resolve(TrainOptions(directory=directory))))
    text = await asyncio.to_thread((directory / NODE_FILE).read_text)
    await asyncio.to_thread((directory / NODE_FILE).write_text, text.replace('name = "own"', 'name = "renamed"'))
    assert SampleReader(directory).newest(3, "own") == []  # nobody knows any more what was asked
    refused = read_events(directory / "events.jsonl")
    assert not [event for event in refused if type(event).__name__ in ("LoopFailed", "WorkerDied")]


async def test_a_ctrl_c_saves_and_the_same_directory_goes_on(letters: Path) -> None:
    directory = letters.parent / "run"
    arguments = ["-m", "swarm.cli.main", "train", "--model", "tiny", "--data", str(letters), "--dir", str(directory)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        "--steps",
        "0",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    began: list[str] = []
    while "  reward " not in (line := (await process.stdout.readline()).decode()):
        assert line, f"it ended with {await process.wait()} before its first step: {' | '.join(began)}"
        began.append(line.rstrip())
    process.send_signal(signal.SIGINT)
    said = (await process.stdout.read()).decode()
    assert await process.wait() == 0
    (step,) = checkpoint_steps(directory / "checkpoints")[-1:]
    assert step >= 1 and f"stopped at step {step}; the same command goes on from there" in said
    assert json.loads((directory / "status.json").read_text(encoding="utf-8"))["was_stopped"]
    lines: list[str] = []
    await train(TrainOptions(directory=directory, steps=step + 1), lines.append)
    assert checkpoint_steps(directory / "checkpoints")[-1] == step + 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return {}[answer]", "KeyError"),
        ("return 2.0", r"returned 2, outside of reward_range \[0, 1\]"),
        ("return int(answer) if answer != reference else 1", "failed on the answer ''.*invalid literal.*run confined"),
        ("return 1.0 if answer == reference else -1.0", r"returned -1, outside of reward_range \[0, 1\]"),
        ("return str(len(answer))", "returned the text '3', where a number belongs"),
        ("return None", "returned nothing: end it with `return` and a number"),
        ("return open('/etc/hostname').read() and 1.0", "Error.*run confined: with the installed packages"),
        ("return 0.0", "in none did rewards differ.*user: sort:.*reference: .*--patient goes on"),
    ],
)
async def test_a_reward_that_teaches_nothing_ends_the_run_with_the_reason(
    letters: Path, body: str, expected: str
) -> None:
    lines: list[str] = []
    with pytest.raises(ConfigError, match=f"(?s){expected}") as ended:
        await train(options_of(letters, reward=reward_file(letters.parent, body)), lines.append)
    if body == "return 0.0":  # the others end before there is a directory
        why = RUN.invoke(app, ["why", str(letters.parent / "run")])
        assert why.exit_code == 1 and "no answer gets any reward" in why.output, why.output
        offer = f"swarm train {letters.parent / 'run'} --warm-up references"
        assert offer in why.output and offer in str(ended.value), why.output


def test_the_directory_of_another_training_is_not_taken(letters: Path) -> None:
    options = options_of(letters)
    config = resolve(options)
    assert not options.directory.exists(), "nothing is written before it was tried"
    assert (
        RUN.invoke(
            app, ["train", "-m", "tiny", "-d", str(letters), "--dir", str(options.directory), "--only-write"]
        ).exit_code
        == 0
    )
    assert (options.directory / NODE_FILE).is_file()
    with pytest.raises(ConfigError, match=r"node\.toml exists and says otherwise for .*generator"):
        resolve(options_of(letters, max_new_tokens=5))
    assert config.is_alone and config.learner.at_end == "stop"


def test_a_training_goes_on_from_any_working_directory(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(letters.parent)
    asyncio.run(prepare(options_of(letters, directory=Path("run")), lambda _: None))
    (letters.parent / "elsewhere").mkdir()
    monkeypatch.chdir(letters.parent / "elsewhere")
    config = asyncio.run(prepare(TrainOptions(directory=Path("../run"), steps=7), lambda _: None))
    assert config.dir.resolve() == letters.parent / "run" and not Path("run").exists()
    assert resolve(options_of(letters)).learner.num_steps == 3  # by another path it is the same training


async def test_a_warm_up_is_made_once_before_step_1_and_is_no_part_of_the_gain(letters: Path) -> None:
    lines: list[str] = []
    await prepare(options_of(letters), lines.append)  # a directory without a step may still get one
    quick = ("warm_up.num_steps=4", "evaluation.num_problems=4")
    options = TrainOptions(directory=letters.parent / "run", warm_up="references", steps=1, overrides=quick)
    await train(options, lines.append, is_patient=True)
    events = read_events(options.directory / "events.jsonl")
    kinds = [type(each) for each in events if isinstance(each, WarmedUp | PolicyEvaluated | VersionPublished)]
    assert kinds[:3] == [WarmedUp, VersionPublished, PolicyEvaluated], "version 0 is what came out of it"
    (warmed,) = [event for event in events if isinstance(event, WarmedUp)]
    said = "\n".join(lines)
    if warmed.report.num_steps:  # this model half knows the task
        assert checkpoint_steps(options.directory / "checkpoints") == [0, 1]
        assert f"right answers, loss {warmed.report.first_loss:.2f} -> {warmed.report.last_loss:.2f}; rewards" in said
        end = f"right answers): own {warmed.report.accuracy['own']:.2f}; changes count from step 0, after it"
        assert any(line.startswith("held out without the warm-up (") and line.endswith(end) for line in lines)
        await asyncio.to_thread(export_model, options.directory, letters.parent / "out", "hf", None, 0.0)
        assert end in await asyncio.to_thread((letters.parent / "out" / "README.md").read_text)
        assert end in RUN.invoke(app, ["why", str(options.directory)]).output
    await train(replace(options, warm_up="", steps=2), lines.append, is_patient=True)
    again = read_events(options.directory / "events.jsonl")
    assert [event for event in again if isinstance(event, WarmedUp)] == [warmed]
    with pytest.raises(ConfigError, match=r"says otherwise for warm_up\.answers"):
        resolve(replace(options, warm_up=str(letters)))


async def test_an_option_that_would_change_nothing_is_refused(letters: Path) -> None:
    await prepare(options_of(letters), lambda _: None)
    with pytest.raises(ConfigError, match=r"--model, --lr cannot change a training that has begun: leave that out"):
        resolve(TrainOptions(directory=letters.parent / "run", model="tiny", learning_rate=0.1))
    said = await describe(resolve(options_of(letters, directory=letters.parent / "long", max_new_tokens=100)))
    assert any("100 tokens, and the right one has 3" in line and "--max-new-tokens 12" in line for line in said)
    begun = resolve(options_of(letters, directory=letters.parent / "begun", prefill="a"))
    assert [each.prefill for each in begun.environments] == ["a"]
    shorter = TrainOptions(directory=letters.parent / "run", overrides=("generator.max_new_tokens=5",))
    assert resolve(shorter).generator.max_new_tokens == 5, "nothing has begun"
    (letters.parent / "run" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"says otherwise for generator\.max_new_tokens"):
        resolve(shorter)


def test_a_reward_that_fails_on_every_answer_is_hopeless(letters: Path) -> None:
    watch = TrainingWatch(resolve(options_of(letters)), print, is_patient=False)
    for _ in range(64):
        assert not watch.is_hopeless
        watch.see(GroupUnscored(env="own", error="invalid literal"))
    assert watch.is_hopeless and watch.explain() == "none of 64 groups could be scored: invalid literal"


def put(reward_mean: float) -> GroupPut:
    return GroupPut(
        digest="d",
        producer="p",
        policy_id="p",
        env="own",
        oldest_step=0,
        size_bytes=1,
        reward_mean=reward_mean,
        num_tokens=8,
    )


def test_a_training_whose_groups_teach_seldom_goes_on(letters: Path) -> None:
    """Of 76 starts of this very training, one had 64 groups in a row without a right answer."""
    watch = TrainingWatch(resolve(options_of(letters)), print, is_patient=False)
    for _ in range(255):
        watch.see(put(0.0))
        assert not watch.is_hopeless
    watch.num_with_signal = lambda: 1
    watch.see(put(0.125))
    assert not watch.is_hopeless
    watch.num_with_signal = lambda: 0
    watch.see(put(0.0))
    assert watch.is_hopeless


def test_a_slow_training_says_that_it_waits_before_it_ends(letters: Path) -> None:
    lines: list[str] = []
    watch = TrainingWatch(resolve(options_of(letters)), lines.append, is_patient=False)
    watch.see(put(0.0))
    watch._first_group_s -= 61.0  # a minute ago
    watch._said_s -= 61.0
    for number in range(2, 65):
        assert not watch.is_hopeless
        watch.see(put(0.0))
        assert (number >= 16) == bool(lines)
    offer = f"You may show the model right answers first: swarm train {letters.parent / 'run'} --warm-up references"
    assert lines[0].startswith(f"step 0     rewards differ in none of the first 16 groups. {offer}")
    assert watch.is_hopeless and lines[1].startswith("step 0  waits: 16 groups since then, in none did rewards differ")


def test_a_training_that_finds_nothing_to_learn_from_any_more_says_so_once_a_minute(letters: Path) -> None:
    lines: list[str] = []
    watch = TrainingWatch(resolve(options_of(letters)), lines.append, is_patient=False)
    watch.see(StepMade(step=1, draw_step=1, digest="d", loss=0.0, grad_norm=0.0, num_tokens=1))
    watch._said_s -= 61.0  # a minute ago
    for _ in range(40):
        watch.see(GroupUnscored(env="own", error="invalid literal"))
    (said,) = [line for line in lines if "waits" in line]
    assert said.startswith("step 1  waits: 16 groups since then, in none did rewards differ") and "swarm why" in said


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_a_training_ends_where_nothing_is_left_to_learn(letters: Path, reward: float) -> None:
    watch = TrainingWatch(resolve(options_of(letters)), print, is_patient=False)
    watch.see(put(0.5))
    watch.see(StepMade(step=7, draw_step=1, digest="d", loss=0.0, grad_norm=0.0, num_tokens=1))
    for _ in range(256):
        assert not watch.is_hopeless
        watch.see(put(reward))
    assert watch.is_hopeless and watch.is_learned_out is bool(reward)
    if watch.is_learned_out:
        assert watch.summary(False)[0] == "nothing is left to learn: all answers of the newest 256 groups are right"


def test_the_time_left_follows_events_that_were_not_logged_yet(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    config = resolve(options_of(letters, steps=40))
    now_s = 10_000.0
    clock = SimpleNamespace(time=lambda: now_s, monotonic=lambda: now_s)
    monkeypatch.setattr("node.training_watch.time", clock)  # first: this machine may have run for longer
    watch = TrainingWatch(config, lines.append, is_patient=False)
    watch.see(VersionPublished(policy_id="p", step=0, digest="d"))
    for step in range(1, 11):
        now_s += 60.0
        watch.see(StepMade(step=step, draw_step=step, digest="d", loss=0.0, grad_norm=0.0, num_tokens=1))
    assert lines[-1].endswith("about 30 min left")


def test_what_was_stopped_is_not_called_done(letters: Path) -> None:
    lines: list[str] = []
    watch = TrainingWatch(resolve(options_of(letters)), lines.append, is_patient=False)
    assert watch.summary(was_stopped=True) == ["stopped at step 0; the same command goes on from there"]
    watch.see(VersionPublished(policy_id="a", step=2, digest="d"))  # of a checkpoint
    assert watch.summary(was_stopped=True)[0].startswith("stopped at step 2;")
    assert watch.summary(was_stopped=False)[-1] == "nothing to do: all 3 steps were made; --steps N makes more"
    watch.see(StepMade(step=3, draw_step=3, digest="d", loss=0.0, grad_norm=0.0, num_tokens=1))
    assert watch.summary(was_stopped=True)[0].startswith("stopped at step 3;")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nothing to resume there; say what to train on"),
        (["--env", "char:sort"], "--model: name one"),
        (["-m", "tiny", "--reward", "x.py:f"], "nothing to resume there"),
        (["-m", "tiny", "--env", "char:srot"], "'srot' is unknown; known: reverse, sort"),
        (["-m", "tiny", "--data", "none.jsonl"], "must be a readable .jsonl file"),
        (
            ["-m", "tiny", "--data", "LETTERS", "--answer", "solution"],
            "has no field 'solution', it has: answer, question",
        ),
        (
            ["-m", "tiny", "--data", "LETTERS", "--reward", "REWARD", "--answer", "solution"],
            "none of the first 300 records has an answer in the field 'solution'",
        ),
        (["-m", "tiny", "--data", "LETTERS", "--set", "learner.learning_rat=1"], "did you mean learning_rate?"),
        (["-m", "tiny", "--env", "char:sort", "--env", "char:sort"], "names must differ"),
        (["-m", "tiny", "--data", "BROKEN"], "record 1 is not JSON"),
        (
            ["-m", "tiny", "--data", "LACKING", "--reward", "REWARD"],
            "1 of the first 3 records have no answer",
        ),
        (["-m", "tiny", "--data", "FOREIGN"], "cannot read character 'W'"),
        (["-m", "tiny", "--env", "char:sort", "--dir", "/proc/none/run"], "cannot be written"),
        (["-m", "tiny", "--data", "LETTERS", "--lr", "0"], "learning_rate: Input should be greater than 0"),
        (["-m", "no-such-model", "--data", "LETTERS"], "no such directory"),
        (["-m", "tiny", "--env", "char:sort", "--recipe", "grop"], "did you mean grpo"),
        (["-m", "tiny", "--env", "char:sort", "--warm-up", "yes"], "references"),
        (["-m", "tiny", "--env", "char:sort", "--warm-up", "none.jsonl"], "must be a readable .jsonl file"),
        (["-m", "tiny", "--env", "char:sort", "--warm-up", "FEW"], "different answers can be shown, and 8 are needed"),
        (
            ["-m", "tiny", "--env", "char:sort", "--recipe", "GRPO", "--set", "learner.recipe_params.weight.lo=0.1"],
            "recipe grpo has no such constant",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    letters: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    good, other = {"question": "sort:ba=", "answer": "ab"}, {"question": "sort:cb="}
    files = {
        "BROKEN": [json.dumps(good), "{"],
        "LACKING": [json.dumps(each) for each in (good, other, good)],
        "FEW": [json.dumps({"question": f"sort:{n}=", "answer": "a" if n < 5 else "W"}) for n in range(40)],
        "FOREIGN": [json.dumps({"question": "What?", "answer": "a"})],
    }
    names = {"LETTERS": str(letters), "REWARD": reward_file(tmp_path, "return 0.5")}
    for name, lines in files.items():
        path = tmp_path / f"{name.lower()}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        names[name] = str(path)
    where = [] if "--dir" in arguments else ["--dir", str(tmp_path / "run")]
    done = RUN.invoke(app, ["train", *where, *(names.get(each, each) for each in arguments)])
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists(), "the next try finds nothing in its way"


def test_samples_says_what_is_missing(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["samples", str(tmp_path)])
    assert done.exit_code == 2 and "no node.toml" in done.stderr


def test_resume_goes_on_or_ends_and_init_from_begins_with_what_was_made(letters: Path, tmp_path: Path) -> None:
    nowhere = RUN.invoke(app, ["train", str(tmp_path / "nowhere"), "--resume"])
    assert nowhere.exit_code == 2 and "--resume: " in nowhere.stderr and "holds no training" in nowhere.stderr
    make_trained_node(tmp_path / "node")
    made = load_trained(tmp_path / "node").version
    assert made is not None
    begun = resolve(options_of(letters, model="", init_from=tmp_path / "node"))
    assert load_model(begun.model).digest == made.digest, "it begins where the other one ended"
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    assert resolve(
        options_of(letters, model="", init_from=tmp_path / "out", directory=tmp_path / "other")
    ).model.source == str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--model tiny and --init-from .*: both name a model; give one"):
        resolve(options_of(letters, init_from=tmp_path / "out", directory=tmp_path / "third"))
