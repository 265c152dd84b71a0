"""Unknown nodes at the coordinator: they get nothing beyond their one vote, and no local path of a joiner."""

from typing import Any

import pytest

from coordinator.advice import MAX_WEIGHTS, OffPolicyAdvisor
from swarm.clock import ManualClock
from swarm.config import EntryConfig, EnvironmentConfig, LearnerConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.types import EdgeReport
from swarm.wire.run_manifest import manifest_of

IDS = [f"{number:064x}" for number in range(100)]


def late(source: str, ess: float) -> EdgeReport:
    return EdgeReport(source=source, num_groups=8, age_mean_steps=2.0, ess_share=ess, mismatch_kl=0.01, reward_mean=0.5)


def test_one_learner_that_invents_sources_has_one_vote_on_the_age_bound() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    for reporter, source in ((0, 1), (1, 2), (2, 0)):
        advisor.report(IDS[reporter], (late(IDS[source], 0.9),), 0.0)
    advisor.report(IDS[3], tuple(late(source, 0.0) for source in IDS[10:74]), 0.0)
    advisor.decide(0.0)
    assert advisor.state == "ok" and advisor.max_age_steps is None


class PartiesOf(Parties):
    """Established are the keys that `table` names, each with its party."""

    def __init__(self, table: dict[str, str]) -> None:
        super().__init__()
        self.table = table

    def is_established(self, node_id: str) -> bool:
        return node_id in self.table

    def party_of(self, node_id: str) -> str:
        return self.table[node_id]


def honest(advisor: OffPolicyAdvisor) -> None:
    for reporter in range(6):
        advisor.report(IDS[reporter], (late(IDS[(reporter + 1) % 6], 0.9),), 0.0)


def test_a_thousand_newcomers_change_no_advice() -> None:
    entry = EntryConfig(members=tuple(IDS[:6]))
    parties = Parties(EntryRule(entry, "run", ManualClock()))
    advisor = OffPolicyAdvisor(base_max_age_steps=4, parties=parties)
    honest(advisor)
    assert advisor.decide(0.0) == []
    before = advisor.advice(IDS[0], 30.0)
    for number in range(1000, 2000):
        edges = tuple(late(source, 0.0) for source in [*IDS[:6], *IDS[20:60]])
        advisor.report(f"{number:064x}", edges, 1.0)
    assert advisor.decide(60.0) == []
    assert advisor.advice(IDS[0], 30.0) == before


def test_a_party_of_many_keys_has_one_vote() -> None:
    parties = PartiesOf({node_id: "one" if number >= 6 else node_id for number, node_id in enumerate(IDS)})
    advisor = OffPolicyAdvisor(base_max_age_steps=4, parties=parties)
    honest(advisor)
    for reporter in range(6, 60):
        advisor.report(IDS[reporter], tuple(late(source, 0.0) for source in IDS[:6]), 0.0)
    advisor.decide(0.0)
    assert advisor.state == "ok" and advisor.max_age_steps is None
    assert {figures.num_parties for figures in advisor.figures(0.0)} == {2}


def test_an_advice_weighs_a_bounded_number_of_sources() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    sources = [f"{number:064x}" for number in range(1, 1001)]
    advisor.report(IDS[0], tuple(late(source, 0.1) for source in sources), 0.0)
    advisor.decide(0.0)
    assert len(advisor.advice(IDS[0], 30.0).source_weights) == MAX_WEIGHTS


def test_a_node_that_is_no_longer_established_loses_its_vote() -> None:
    parties = PartiesOf({IDS[0]: "a"})
    advisor = OffPolicyAdvisor(4, parties=parties)
    advisor.report(IDS[0], (late(IDS[1], 0.1),), 0.0)
    assert len(advisor.figures(0.0)) == 1
    parties.table.clear()
    assert advisor.figures(0.0) == [] and advisor.decide(0.0) == []


def test_a_learner_holds_no_more_edges_than_its_newest_report() -> None:
    advisor = OffPolicyAdvisor(base_max_age_steps=4)
    for first in range(1, 90):
        advisor.report(IDS[0], (late(IDS[first], 0.9),), 0.0)
    assert [figures.source for figures in advisor.figures(0.0)] == [IDS[89]]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"params": {"max_digits": 10**9}}, "params"),
        ({"params": {"max_digits": float("nan")}}, "params"),
        ({"params": {str(number): 1 for number in range(100)}}, "params"),
        ({"params": {"a": [[[[[[1]]]]]]}}, "params"),
        ({"kind": "jsonl", "digest": "0" * 64, "dataset": "/etc/passwd.jsonl"}, "dataset"),
        ({"kind": "jsonl", "digest": "0" * 64, "dataset": "data/../../x.jsonl"}, "dataset"),
        ({"kind": "jsonl", "digest": "0" * 64, "dataset": "x.jsonl", "params": {"path": "/y.jsonl"}}, "dataset"),
        ({"prompt": "{question}" + "x" * 10_000}, "prompt"),
        ({"seed": 2**60}, "seed"),
    ],
)
def test_a_manifest_cannot_name_a_local_path_or_a_problem_without_bound(changes: dict[str, Any], field: str) -> None:
    env = EnvironmentConfig.model_validate({"name": "sums", "kind": "reasoning_gym", "dataset": "chain_sum", **changes})
    with pytest.raises(ConfigError, match=field):
        manifest_of(NodeConfig(environments=(env,)), "run", "", 0.0)


def test_a_manifest_cannot_name_a_directory_as_its_model_nor_unbounded_recipe_params() -> None:
    model = ModelConfig(source="/srv/model", digest="0" * 64)
    with pytest.raises(ConfigError, match=r"model[.]source"):
        manifest_of(NodeConfig(model=model), "run", "", 0.0)
    with pytest.raises(ConfigError, match="recipe_params"):
        manifest_of(NodeConfig(learner=LearnerConfig(recipe_params={"low": 1e30})), "run", "", 0.0)
