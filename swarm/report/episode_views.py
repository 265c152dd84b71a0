"""Episodes of a report, as people read them: turn by turn, before and after training.

Invariant: text of models and environments is shown unchanged, except for characters that a terminal or a page would
obey; calls are those that `parse_action` reads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.environments.tool_calls import parse_action
from swarm.episode import Message, TurnStatus
from swarm.printable import printable
from swarm.report.figures import Change, change
from swarm.report.result import NodeResult, RunResult
from swarm.telemetry.shown_episodes import ShownEpisode


@dataclass(frozen=True, kw_only=True)
class TurnView:
    """An action, its observation and its reward."""

    number: int
    who: str  # `model`, or its role in the episode
    text: str
    calls: tuple[str, ...]  # such as `search(query="Ada")`
    observation: tuple[Message, ...]
    opens: bool  # the observation begins another conversation, in which earlier turns are not seen
    reward: float
    status: str  # empty: ok


@dataclass(frozen=True, kw_only=True)
class EpisodeView:
    """One try at a problem by one step of the policy."""

    step: int
    turns: tuple[TurnView, ...]
    succeeded: bool
    all_tries: str  # how many of them succeeded; empty where there was no other
    rewards: tuple[tuple[str, float], ...]  # of the episode, by name
    ending: str  # how it ended


@dataclass(frozen=True, kw_only=True)
class ProblemView:
    """A problem with the tries of one node at it, in order of steps."""

    task_id: int
    opening: tuple[Message, ...]
    reference: str
    tries: tuple[EpisodeView, ...]


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """Success and episodes of one node in one environment."""

    name: str
    is_own: bool  # it generates this environment
    num_own: int  # groups of it learned from
    num_others: int
    held_out: Change | None
    rival_held_out: Change | None
    problems: tuple[ProblemView, ...]


@dataclass(frozen=True, kw_only=True)
class EnvironmentView:
    """Success and episodes in one environment, node by node."""

    env: str
    exchange: str  # class of its episodes: whose count
    nodes: tuple[NodeView, ...]  # those that generate it first

    @property
    def has_problems(self) -> bool:
        return any(node.problems for node in self.nodes)

    def is_open(self, node: NodeView) -> bool:
        """True if the page shows the episodes of a node unfolded.

        True only for episodes with several turns, of the first node that generates the environment and of the first
        that does not.
        """
        several = any(len(each.turns) > 1 for problem in node.problems for each in problem.tries)
        return several and node == next(each for each in self.nodes if each.is_own == node.is_own)


def environment_views(result: RunResult) -> list[EnvironmentView]:
    """A view of every environment with all nodes that train; nodes that generate the environment come first."""
    swarm = result.swarm
    rivals = {node.name: node for node in result.rival.trainers} if result.rival else {}
    views: list[EnvironmentView] = []
    for env in swarm.environments:
        nodes = [_node_view(node, env, rivals.get(node.name)) for node in swarm.trainers]
        exchange = next((node.exchange[env] for node in swarm.nodes if env in node.exchange), "")
        views.append(
            EnvironmentView(env=env, exchange=exchange, nodes=tuple(sorted(nodes, key=lambda node: not node.is_own)))
        )
    return views


def example_of(views: Sequence[EnvironmentView]) -> tuple[str, NodeView, ProblemView] | None:
    """Environment, node and problem to show as an example in a terminal; None if no first problem has several turns.

    The node is preferably one that does not generate the environment.
    """
    shown = [(view.env, node, node.problems[0]) for view in views for node in view.nodes if node.problems]
    several = [each for each in shown if any(len(one.turns) > 1 for one in each[2].tries)]
    return next((each for each in several if not each[1].is_own), next(iter(several), None))


def _node_view(node: NodeResult, env: str, rival: NodeResult | None) -> NodeView:
    num_own, num_others = node.learned_from.get(env, (0, 0))
    episodes = sorted((each for each in node.episodes if each.env == env), key=lambda each: each.step)
    tasks = list(dict.fromkeys(each.task_id for each in episodes))
    return NodeView(
        name=node.name,
        is_own=env in node.curriculum,
        num_own=num_own,
        num_others=num_others,
        held_out=change(node, (env,), "held_out"),
        rival_held_out=None if rival is None else change(rival, (env,), "held_out"),
        problems=tuple(_problem([each for each in episodes if each.task_id == task]) for task in tasks),
    )


def _problem(tries: Sequence[ShownEpisode]) -> ProblemView:
    first = tries[0]
    return ProblemView(
        task_id=first.task_id,
        opening=_shown(first.opening),
        reference=printable(first.reference),
        tries=tuple(_episode(each) for each in tries),
    )


def _episode(episode: ShownEpisode) -> EpisodeView:
    transitions = episode.outcome.transitions
    conversations = [0, *(transition.conversation for transition in transitions)]
    last = transitions[-1].status if transitions else TurnStatus.OK
    ending = "" if last == TurnStatus.OK else _words(last)
    if not episode.outcome.is_ended:
        ending = "no room for another turn"
    return EpisodeView(
        step=episode.step,
        turns=tuple(
            TurnView(
                number=number,
                who=printable(transition.role) or "model",
                text=printable(text),
                calls=tuple(printable(_call(each.name, dict(each.arguments))) for each in parse_action(text).calls),
                observation=_shown(transition.messages),
                opens=bool(transition.messages) and transition.conversation not in conversations[:number],
                reward=transition.reward,
                status="" if transition.status == TurnStatus.OK else _words(transition.status),
            )
            for number, (text, transition) in enumerate(zip(episode.actions, transitions, strict=False), 1)
        ),
        succeeded=episode.outcome.is_success,
        all_tries=f"{episode.num_right} of {episode.num_tries} tries succeed" if episode.num_tries > 1 else "",
        rewards=tuple((printable(name), value) for name, value in sorted(episode.outcome.rewards.items())),
        ending=ending,
    )


def _shown(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(Message(role=printable(each.role), content=printable(each.content)) for each in messages)


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"


def _words(status: TurnStatus) -> str:
    return "turn limit" if status == TurnStatus.LIMIT else status.replace("_", " ")
