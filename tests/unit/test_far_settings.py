"""Which keys are suspects, and that a suspect is blamed for what it explains, and for nothing else."""

from swarm.causes import Certainty, Diagnosed, Gravity, Snapshot, diagnose
from swarm.causes.all_rules import RULES, SYMPTOMS
from swarm.causes.far_settings import far_settings
from swarm.causes.finding import Suspect, by_cause, with_guilty
from swarm.causes.group_rules import one_question, suspects
from swarm.causes.reward_rules import reward_is_random
from swarm.causes.settings_table import FAR
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import AnsweredGroup
from swarm.config import NodeConfig
from swarm.events import NODE, LoopFailed, NodeStarted, StepMade

OF_ANSWERS = {"few_questions", "answers_alike", "empty_answers", "rewards_add_up_to_nothing", "model_knows_nothing"}


def suspect(*explains: str) -> Suspect:
    finding = Diagnosed(name="far", claim="far", evidence=("1",), gravity=Gravity.NOTE, key="a.b")
    return Suspect(finding=finding, explains=frozenset(explains))


def effect(name: str, gravity: Gravity) -> Diagnosed:
    return Diagnosed(name=name, claim=name, evidence=("2",), gravity=gravity)


def test_a_suspect_that_explains_nothing_is_not_blamed() -> None:
    found = [effect("ill", Gravity.STOPS)]
    assert with_guilty(found, [suspect("other")]) == found and with_guilty([], [suspect("ill")]) == []


def test_a_suspect_comes_before_what_it_explains_and_is_as_grave() -> None:
    found = by_cause(with_guilty([effect("ill", Gravity.STOPS), effect("note", Gravity.NOTE)], [suspect("ill")]))
    assert [each.name for each in found] == ["far", "ill", "note"]
    assert found[0].gravity is Gravity.STOPS and found[0].evidence == ("1", "seen of it: ill", "2")


def test_defaults_are_no_suspects() -> None:
    assert far_settings(Snapshot(now_s=0.0, config=NodeConfig())) == []


def test_each_key_exists_and_explains_what_rules_find() -> None:
    known = {rule.__name__ for rule in (*RULES, *SYMPTOMS)} | NO_SIGNAL | OF_ANSWERS
    for far in FAR:
        section, _, name = far.key.rpartition(".")
        part = getattr(NodeConfig(), section) if section else NodeConfig()
        assert name in type(part).model_fields and far.explains <= known, (far.key, far.explains - known)


def test_a_healthy_node_with_a_far_setting_is_healthy() -> None:
    config = NodeConfig.model_validate({"generator": {"temperature": 0.1}, "guard": {"enabled": False}})
    step = StepMade(step=1, draw_step=1, digest="1", loss=0.0, grad_norm=1.0, num_tokens=5)
    snapshot = Snapshot(now_s=1.0, config=config, events=(step,), status={"at_s": 1.0, "last_step_at_s": 1.0})
    found = diagnose(snapshot)
    assert found[0].key == "generator.temperature" and {each.gravity for each in found} == {Gravity.NOTE}


def groups(count: int, *, prompt: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> tuple[AnsweredGroup, ...]:
    """Two equal answers to each of so many tasks."""
    return tuple(
        AnsweredGroup(
            env="own",
            rewards=rewards,
            is_cut=(False, False),
            num_tokens=(3, 3),
            task_id=number,
            prompt=prompt or number,
            texts=(number, number),
        )
        for number in range(count)
    )


def test_equal_answers_with_different_rewards_are_a_reward_by_chance() -> None:
    found = reward_is_random(Snapshot(now_s=0.0, answers=groups(8)))
    assert found is not None and found.certainty is Certainty.SURE
    assert reward_is_random(Snapshot(now_s=0.0, answers=groups(8, rewards=(1.0, 1.0)))) is None


def test_different_tasks_with_one_prompt_are_one_question() -> None:
    found = one_question(Snapshot(now_s=0.0, answers=groups(8, prompt=5)))
    assert found is not None and found.key == "environments.dataset"
    assert one_question(Snapshot(now_s=0.0, answers=groups(8))) is None


def test_answers_that_are_all_alike_are_a_suspect() -> None:
    assert [each.finding.name for each in suspects(Snapshot(now_s=0.0, answers=groups(8)))] == ["answers_alike"]


def test_words_of_the_system_name_the_cause_of_an_end() -> None:
    error = LoopFailed(at_s=1.0, loop=NODE, error="OSError: [Errno 98] Address already in use")
    snapshot = Snapshot(now_s=2.0, config=NodeConfig(), runs=False, events=(error,))
    assert diagnose(snapshot)[0].name == "port_taken"
    locked = LoopFailed(at_s=1.0, loop=NODE, error="OperationalError: database is locked")
    snapshot = Snapshot(now_s=2.0, config=NodeConfig(), runs=False, events=(locked,))
    assert diagnose(snapshot)[0].name == "database_locked"
    own = LoopFailed(at_s=1.0, loop=NODE, error="ConfigError: environment own: no such dataset")
    snapshot = Snapshot(now_s=2.0, config=NodeConfig(), runs=False, events=(own,))
    assert diagnose(snapshot)[0].name == "ended_with_error"


def test_a_node_without_a_peer_so_far_is_blamed_only_where_it_wants_none() -> None:
    def said(**exchange: int) -> list[str]:
        config = NodeConfig.model_validate({"exchange": exchange})
        started = NodeStarted(at_s=1.0, node_id="a")
        status = {"at_s": 31.0, "last_step_at_s": 31.0, "peers": []}
        return [each.name for each in diagnose(Snapshot(now_s=31.0, config=config, status=status, events=(started,)))]

    assert not {"no_peer_yet", "max_neighbours_too_low"} & {*said()}
    assert said(max_neighbours=0)[0] == "max_neighbours_too_low"
