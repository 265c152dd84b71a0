"""Evaluation of a model: figures against counting, equal problems for equal arguments, and the commands around it."""

import asyncio
import itertools
import json
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError
from swarm.testing.trained_node import make_trained_node
from swarm.trained.evaluation import EvaluationPlan, evaluate_model, mean_of, own_environment, pass_at_k
from swarm.trained.model import load_target
from swarm.types import EpisodeLimits

LIMITS = EpisodeLimits(max_new_tokens=8)
RUN = CliRunner()


def silent(name: str, done: int, total: int) -> None:
    """No progress."""


def test_pass_at_k_is_the_share_of_draws_with_a_right_try() -> None:
    for num_right in range(6):
        tries = [number < num_right for number in range(5)]
        for k in range(1, 6):
            drawn = [any(chosen) for chosen in itertools.combinations(tries, k)]
            assert pass_at_k(5, num_right, k) == pytest.approx(fmean(drawn), abs=1e-12)


def test_an_interval_is_that_of_a_mean_over_problems() -> None:
    mean = mean_of([0.0, 1.0, 1.0, 0.0])
    assert mean.value == 0.5
    assert mean.half_width == pytest.approx(1.96 * (1 / 3) ** 0.5 / 2)


async def test_tries_are_scored_counted_and_the_same_again(tmp_path: Path) -> None:
    config = make_trained_node(tmp_path / "node")
    plan = EvaluationPlan(environments=config.environments, limits=LIMITS, num_problems=6, num_tries=4)
    model = load_target(str(tmp_path / "node"))
    first, again = [await evaluate_model(model, plan, silent) for _ in range(2)]
    assert first == again
    assert [each.env for each in first] == ["reverse", "sort"]
    for of_env in first:
        assert len(of_env.problems) == 6 and of_env.num_unscored == 0 and of_env.num_tries == 4
        assert all(problem.task.is_held_out for problem in of_env.problems)
        tries = [tried for problem in of_env.problems for tried in problem.tries]
        assert of_env.pass_at(1).value == pytest.approx(fmean(tried.is_success for tried in tries))
        assert of_env.mean_tokens == pytest.approx(fmean(tried.num_tokens for tried in tries))
        for tried in tries:
            assert 0 < tried.num_tokens <= 8
            # an ended answer has its end token besides its characters
            assert tried.num_tokens == len(tried.actions[-1]) + (not tried.is_cut_off)


async def test_episodes_of_several_turns_are_played(tmp_path: Path) -> None:
    environment = EnvironmentConfig.model_validate(
        {"name": "look_up", "kind": "look_up", "seed": 1, "params": {"style": "char"}}
    )
    limits = EpisodeLimits(max_new_tokens=6, max_episode_tokens=110)
    plan = EvaluationPlan(environments=(environment,), limits=limits, num_problems=4, num_tries=2)
    (score,) = await evaluate_model(load_target("tiny-agents"), plan, silent)
    assert max(len(tried.actions) for problem in score.problems for tried in problem.tries) > 1


def test_own_data_and_reward_are_evaluated_and_every_try_can_be_read(tmp_path: Path) -> None:
    data, judge, out = tmp_path / "quiz.jsonl", tmp_path / "judge.py", tmp_path / "tries.jsonl"
    data.write_text("".join(json.dumps({"question": f"sort:{n}21=", "answer": f"12{n}"}) + "\n" for n in range(3, 8)))
    judge.write_text("def score(question, answer, reference):\n    return len(answer) / 10\n")
    arguments = ["eval", "tiny", "--data", str(data), "--reward", f"{judge}:score", "--max-new-tokens", "6"]
    done = RUN.invoke(app, [*arguments, "--tries", "2", "--json", "--save", str(out)])
    assert done.exit_code == 0, done.output
    (figures,) = json.loads(done.stdout)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert figures["problems"] == 5 and len(rows) == 5 * 3
    sampled = [row for row in rows if not row["is_greedy"]]
    assert figures["reward"] == pytest.approx(fmean(row["reward"] for row in sampled))
    assert all(row["reward"] == pytest.approx(len(row["actions"][0].strip()) / 10) for row in rows)


def test_fields_and_range_of_own_data_are_named(tmp_path: Path) -> None:
    data, judge = tmp_path / "quiz.jsonl", tmp_path / "judge.py"
    data.write_text(json.dumps({"asked": "sort:21=", "right": "12"}) + "\n")
    judge.write_text("def score(question, answer, reference):\n    return -3.0 if reference == '12' else 0.0\n")
    arguments = ["eval", "tiny", "--data", str(data), "--reward", f"{judge}:score", "--tries", "1", "--json"]
    named = RUN.invoke(app, [*arguments, "--question", "asked", "--answer", "right", "--reward-range", "-4", "0"])
    assert named.exit_code == 0, named.output
    assert json.loads(named.stdout)[0]["reward"] == 0.25
    lacking = RUN.invoke(app, arguments)
    assert lacking.exit_code == 2 and "has no field 'question', it has: asked, right" in " ".join(
        lacking.stderr.split()
    )


def test_a_reward_that_raises_is_said_and_the_exit_code_tells(tmp_path: Path) -> None:
    data, judge = tmp_path / "quiz.jsonl", tmp_path / "judge.py"
    data.write_text(json.dumps({"question": "sort:21=", "answer": "12"}) + "\n")
    judge.write_text("def score(question, answer, reference):\n    return {}['no such key']\n")
    done = RUN.invoke(app, ["eval", "tiny", "--data", str(data), "--reward", f"{judge}:score", "--tries", "0"])
    assert done.exit_code == 1
    assert "1 problems of own could not be scored" in done.stderr and "no such key" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny"], "say on what to evaluate it, --config node.toml or --data FILE.jsonl"),
        (["tiny", "--reward", "a.py:b"], "needs the problems, --data FILE.jsonl"),
        (["tiny", "--split", "test"], "expected held_out or all"),
        (
            ["tiny", "--save", "absent/tries"],
            "absent/tries: cannot be written: No such file",
        ),
        (["NODE", "--env", "reserve"], "unknown environment; known: reverse, sort"),
        (["NODE", "--step", "9"], "holds steps 0"),
        (["tiny", "--step", "9"], "has no checkpoints; leave it out"),
        (["nowhere"], "no such directory"),
    ],
)
def test_a_wrong_option_is_said_with_its_fix(tmp_path: Path, arguments: list[str], expected: str) -> None:
    make_trained_node(tmp_path / "node")
    done = RUN.invoke(app, ["eval", *[str(tmp_path / "node") if each == "NODE" else each for each in arguments]])
    assert done.exit_code == 2
    assert expected in " ".join(done.stderr.split())


def test_commands_export_verify_and_chat(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    node, out = str(tmp_path / "node"), str(tmp_path / "out")
    done = RUN.invoke(app, ["export", node, out])
    assert done.exit_code == 0 and "hf" in done.stdout, done.output
    assert "all as signed" in RUN.invoke(app, ["verify", out]).stdout
    ask = ["-m", "sort:cab=", "--temperature", "0", "--max-new-tokens", "8"]
    answers = [RUN.invoke(app, ["chat", target, *ask]).stdout for target in (node, out)]
    assert answers[0] == answers[1] and answers[0].strip()
    again = RUN.invoke(app, ["export", node, out])
    assert again.exit_code == 2 and "not empty" in again.stderr
    assert "hf, peft, gguf" in RUN.invoke(app, ["export", node, out, "--format", "onnx"]).stderr
    assert "no node.toml" in RUN.invoke(app, ["export", str(tmp_path), out]).stderr


def test_a_conversation_reads_lines_until_its_end(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    options = ["chat", str(tmp_path / "node"), "--temperature", "0", "--max-new-tokens", "8"]
    lines = RUN.invoke(app, options, input="sort:cab=\n/new\nsort:cab=\nA\n").stdout.splitlines()
    answers = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    assert answers[0] == answers[1] or answers[0] == answers[1].removeprefix("> ")
    assert any("cannot read character 'A'" in line for line in lines)


def test_own_data_without_a_reward_wants_the_same_answer(tmp_path: Path) -> None:
    data = tmp_path / "quiz.jsonl"
    data.write_text(json.dumps({"question": "sort:21=", "answer": "12"}) + "\n")
    plan = EvaluationPlan(
        environments=(own_environment(data, ""),), limits=LIMITS, split="all", num_problems=1, num_tries=1
    )
    (score,) = asyncio.run(evaluate_model(load_target("tiny"), plan, silent))
    (problem,) = score.problems
    assert problem.reference == "12" and problem.greedy.is_success == (problem.greedy.actions[-1] == "12")


def test_own_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["eval", "tiny", "--data", str(tmp_path / "none.jsonl")])
    assert done.exit_code == 2 and "none.jsonl" in done.stderr
    with pytest.raises(ConfigError, match="cannot read character"):
        data = tmp_path / "quiz.jsonl"
        data.write_text(json.dumps({"question": "What is 2+2?", "answer": "4"}) + "\n")
        plan = EvaluationPlan(environments=(own_environment(data, ""),), limits=LIMITS, split="all")
        asyncio.run(evaluate_model(load_target("tiny"), plan, silent))
