"""Summary table of a simulation in the terminal.

Invariant: each figure comes from the function that report.json or the HTML page takes it from.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.config import GuardLimits
from swarm.report.episode_views import EpisodeView, NodeView, ProblemView, environment_views, example_of
from swarm.report.figures import (
    Change,
    FollowRow,
    NodeRow,
    advantage_over_rival,
    follow_rows,
    node_rows,
    shared_step,
)
from swarm.report.live import figure
from swarm.report.result import RIVALS, RunResult, SwarmResult

_MAX_SHOWN = 160  # characters of a text of an episode
ARROW = "\N{RIGHTWARDS ARROW}"  # one column where `->` takes two


def render_summary(result: RunResult) -> RenderableType:
    """Summary of a run: if it learned, tables of its nodes and its rival's, their difference, and the invariants."""
    parts: list[RenderableType] = [
        Text(f"{node.name}: {line}") for node in result.swarm.trainers for line in node.learning.lines[:1]
    ]
    parts += [table_of(node_rows(result.swarm), result.title)]
    if result.rival is not None:
        parts += [
            table_of(node_rows(result.rival), f"For comparison ({result.rival_kind}): {RIVALS[result.rival_kind]}"),
            *_comparison(result),
        ]
    parts += _set_aside(result.swarm)
    parts.append(_baseline(result.swarm))
    example = example_of(environment_views(result))
    parts += [] if example is None else [Text(""), _episode_table(*example)]
    parts += [_follow_table(rows)] if (rows := follow_rows(result.swarm)) else []
    parts += _too_old(result.swarm)
    parts.append(Text(""))
    for verdict in result.invariants:
        mark, style = ("ok  ", "green") if verdict.holds else ("FAIL", "bold red")
        detail = f"  ({verdict.detail})" if verdict.detail else ""
        parts.append(Text.assemble((mark, style), f" {verdict.name}", (detail, "dim" if verdict.holds else "red")))
    return Group(*parts)


def table_of(rows: Sequence[NodeRow], title: str) -> Table:
    """Table with a row for each node, for a terminal of 80 columns."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("node", no_wrap=True)
    table.add_column("trains\non", min_width=8)
    names = ("steps", "own\nall", "own\nheld out", "other\nall", "other\nheld out")
    for name in (*names, "local/\next", "age", "ESS", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return table


def _cells(row: NodeRow) -> list[str]:
    return [
        row.name,
        ", ".join(row.curriculum),
        str(row.num_steps),
        arrow(row.own["all"]),
        arrow(row.own["held_out"]),
        arrow(row.other["all"]),
        arrow(row.other["held_out"]),
        f"{row.num_local}/{row.num_external}",
        figure(row.age_mean_steps),
        figure(row.ess_share),
        figure(row.tokens_per_s, 0),
    ]


def arrow(change: Change | None) -> str:
    """A change as text, such as `.16`, an arrow and `.71`; a dash for None."""
    return "-" if change is None else f"{figure(change.before)}{ARROW}{figure(change.after)}"


def _follow_table(rows: list[FollowRow]) -> Table:
    table = Table(title=Text("How generators followed"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("node", no_wrap=True)
    for name in (
        "versions\ntaken",
        "\nrefused",
        "KB a\nversion",
        "s from step\nto serving",
        "\n95 %",
        "pause\ns",
        "mismatch\nnats",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        kilobytes = None if row.bytes_per_version is None else row.bytes_per_version / 1000
        table.add_row(
            Text(row.name),
            str(row.num_versions),
            str(row.num_not_taken),
            figure(kilobytes, 1),
            figure(row.lag_s),
            figure(row.lag_p95_s),
            figure(row.pause_s),
            figure(row.mismatch_nats, 4),
        )
    return table


def _episode_table(env: str, node: NodeView, problem: ProblemView) -> Table:
    """Table of the tries of one node at one problem, a column for each step of the policy."""
    whose = "generates" if node.is_own else "never generates"
    asked = _cut(problem.opening[-1].content if problem.opening else "")
    title = f"An episode of {env}, which {node.name} {whose}: {asked}"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, expand=False)
    for each in problem.tries:
        what = each.all_tries or ("success" if each.succeeded else "failure")
        table.add_column(Text(f"step {each.step}: {what}"), overflow="fold")
    table.add_row(*(_transcript(each) for each in problem.tries))
    return table


def _transcript(episode: EpisodeView) -> Text:
    """A line for each action, with its reward and status, and one for each message that follows."""
    text = Text()
    for turn in episode.turns:
        text.append("" if turn.who == "model" else f"{turn.who}: ")
        text.append(f"{_cut(turn.text) or '(nothing)'}", "bold")
        text.append(f"  {'+' if turn.reward > 0 else ''}{figure(turn.reward)}" if turn.reward else "")
        text.append(f"  {turn.status}\n" if turn.status else "\n", "red")
        text.append("  another conversation\n" if turn.opens else "", "dim")
        for message in turn.observation:
            text.append(f"  {message.role}: {_cut(message.content)}\n", "dim")
    rewards = ", ".join(f"{name} {figure(value)}" for name, value in episode.rewards)
    has_status = any(turn.status for turn in episode.turns[-1:])
    text.append("; ".join(part for part in (rewards, "" if has_status else episode.ending) if part))
    return text


def _cut(text: str) -> str:
    """The text, or an ellipsis and its last `_MAX_SHOWN` characters."""
    return text if len(text) <= _MAX_SHOWN else "\N{HORIZONTAL ELLIPSIS}" + text[-_MAX_SHOWN:]


def _comparison(result: RunResult) -> list[Text]:
    step = shared_step(result)
    lines: list[Text] = []
    for own, words in ((True, "own tasks"), (False, "other tasks")):
        found = [(split, advantage_over_rival(result, split, own)) for split in ("all", "held_out")]
        text = ", ".join(f"{value:+.2f} {split.replace('_', ' ')}" for split, value in found if value is not None)
        if text:
            lines.append(Text(f"swarm minus {result.rival_kind} at step {step}, {words}: {text}"))
    if result.rival is not None:
        ours, theirs = result.swarm.tokens_generated, result.rival.tokens_generated
        lines.append(Text(f"generated tokens: {ours:,}, {theirs:,} {result.rival_kind}"))
    return lines


def _too_old(swarm: SwarmResult) -> list[Text]:
    """A line for each learner with own groups that were too old to learn from, with the number of turns hit most."""
    lines: list[Text] = []
    for node in swarm.trainers:
        num_too_old = sum(row.num_too_old for row in node.by_turns)
        if num_too_old:
            share = num_too_old / sum(row.num_made for row in node.by_turns)
            line = f"{node.name}: {share:.1%} of the groups of its own policy were too old to learn from"
            if len(node.by_turns) > 1:
                worst = max(node.by_turns, key=lambda row: row.too_old_share)
                line += f" ({worst.too_old_share:.1%} of those with {worst.num_turns} turns)"
            lines.append(Text(line))
    return lines


def _set_aside(swarm: SwarmResult) -> list[Text]:
    """A line on the groups that were drawn and not learned from; no line if there are none."""
    aside = [node for node in swarm.nodes if node.num_set_aside]
    if not aside:
        return []
    line = f"set aside (drawn, not learned from): {', '.join(f'{each.name} {each.num_set_aside}' for each in aside)}"
    worst = max((kl for each in aside for kl in each.edges_kl.values()), default=0.0)
    if worst > GuardLimits().tight_kl:
        line += (
            f"; their policies were up to {worst:.2g} nats a token (KL) from the learner's: a lower learning rate or "
            f"replay.max_age_steps keeps them nearer; the guard's bound is {GuardLimits().tight_kl:g}"
        )
    return [Text(line)]


def _baseline(swarm: SwarmResult) -> Text:
    """A line with the accuracy of always giving the commonest answer, and the number of problems (n)."""
    last = {(row.env, row.split): row for node in swarm.nodes for row in node.evaluations}
    if not last:
        return Text("nothing was evaluated", style="dim")
    text = "always giving the commonest answer would score: "
    if len(last) > 8:
        shares = sorted(row.majority_baseline for row in last.values())
        sizes = sorted({row.num_problems for row in last.values()})
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return Text(f"{text}{figure(shares[0])} to {figure(shares[-1])} (n={span} for each task)", style="dim")
    parts = [
        f"{env} {split.replace('_', ' ')} {figure(row.majority_baseline)} (n={row.num_problems})"
        for (env, split), row in sorted(last.items())
    ]
    return Text(text + ", ".join(parts), style="dim")
