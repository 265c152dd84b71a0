"""`swarm report`: the page about the directories of nodes, which run, have ended, or were lied to."""

import json
import math
import re
import tracemalloc
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import ADA, BELL, evaluated, make, write_events
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import NODE_FILE
from swarm.errors import ConfigError
from swarm.events import (
    EarlierRefusals,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    LoopFailed,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    to_json,
)
from swarm.pages.charts import MAX_POINTS, Series, line_chart
from swarm.report.contributions import (
    MAX_OUTSIDERS,
    MAX_ROWS,
    NUM_BARS,
    contribution_views,
    refusal_views,
    sources_view,
)
from swarm.report.html import render_html
from swarm.report.invariants import ADMITTED, EXISTED, NO_FAILURE
from swarm.report.node_directory import EVENTS, NodeReports
from swarm.report.result import NodeResult, RunResult, SwarmResult
from swarm.report.tally import NodeTally, node_result
from swarm.simulate.command import judge
from swarm.simulate.local.run import NodeRun, SwarmRun
from swarm.simulate.presets import SimulationOptions
from swarm.telemetry import EventTail
from swarm.testing.trained_node import OTHER, make_trained_node
from swarm.trained.samples import Sample, SampledGroup

RUN = CliRunner()


def put(digest: str, producer: str = ADA, **changes: Any) -> GroupPut:
    return make(
        GroupPut, **{"digest": digest, "producer": producer, "policy_id": producer, "num_tokens": 40, **changes}
    )


def admitted(digest: str, producer: str = BELL) -> GroupAdmitted:
    return make(GroupAdmitted, digest=digest, producer=producer, policy_id=producer, via=producer)


def use(digest: str, producer: str = ADA) -> GroupUse:
    return make(GroupUse, digest=digest, producer=producer, policy_id=producer, is_own_policy=producer == ADA)


def drawn(step: int, *groups: GroupUse, **changes: Any) -> GroupsDrawn:
    return make(GroupsDrawn, draw_step=step, groups=groups, **changes)


FIGURES = {
    **{"reward_mean": 0.5, "entropy_nats": 1.25, "learning_rate": 1e-4, "response_tokens_mean": 12.0},
    **{"cut_off_share": 0.25, "mismatch_kl_k3": 0.01, "ess_share": 0.9, "age_mean_steps": 1.0},
}


def step_made(step: int, **changes: Any) -> StepMade:
    given = {"step": step, "draw_step": step, "diagnostics": FIGURES, "seconds": {"score": 1.0}, **changes}
    return make(StepMade, **given)


def node_directory(path: Path, events: Sequence[Event], name: str = "ada", node_id: str = ADA) -> Path:
    """A directory of a node that wrote these events, one a minute."""
    path.mkdir()
    (path / NODE_FILE).write_text(f'name = {json.dumps(name)}\nrun_id = "letters"\ndir = "{path}"\n')
    status = {"node_id": node_id, "at_s": 0.0, "last_step_at_s": 0.0, "pid": 1, "step": 2, "num_failures": 0}
    (path / "status.json").write_text(json.dumps({**status, "advice": "ok", "name": name}))
    write_events(path / EVENTS, events)
    return path


COURSE: list[Event] = [
    NodeStarted(node_id=ADA),
    put("aa", finishes={"stop": 3, "length": 1}),
    put("ab", finishes={"stop": 4}),
    put("ac", finishes={"stop": 4}),
    admitted("ba"),
    GroupRefused(reason="too_old", producer=BELL, via=BELL, digest="bb"),
    drawn(1, use("aa"), use("ba", BELL), zero_variance=("ab",), too_old=("ac",), num_zero_variance=1),
    step_made(1, num_local=1, num_external=1),
]


def one_node(*events: Event) -> NodeResult:
    return node_result("ada", ADA, (), [replace(event, at_s=60.0 * i + 60) for i, event in enumerate(events)], {})


def test_what_each_producer_brought_is_counted_to_its_end() -> None:
    own, bell = one_node(*COURSE).contributions
    assert (own.producer, own.num_brought, own.num_learned_from, own.num_without_signal, own.num_too_old) == (
        ADA, 3, 1, 1, 1,
    )  # fmt: skip
    assert (bell.producer, bell.num_brought, bell.num_bytes, bell.num_learned_from) == (BELL, 1, 500, 1)
    assert bell.refused == {"too_old": 1}
    aside = one_node(*COURSE[:-1], step_made(1, was_skipped=True)).contributions
    assert [(row.num_learned_from, row.num_set_aside) for row in aside] == [(0, 1), (0, 1)]


def test_refusals_that_the_log_summed_up_or_lost_are_nobodys() -> None:
    node = one_node(
        EarlierRefusals(refused={"too_old": 5}),
        GroupRefused(reason="too_old", producer=BELL, count=2),
        EarlierRefusals(refused={"too_old": 7}),  # a rotation that lost nothing
        GroupRefused(reason="duplicate", count=3),
    )
    assert node.refusals == {"too_old": 7, "duplicate": 3} and not node.is_whole
    by_producer = {row.producer: row.refused for row in node.contributions}
    assert by_producer == {"": {"too_old": 5, "duplicate": 3}, BELL: {"too_old": 2}}


def test_a_flood_of_producers_makes_a_page_no_longer() -> None:
    many = [f"{number:064x}" for number in range(500)]
    events = [admitted(f"d{each}", each) for each in many]
    refused = [GroupRefused(reason=f"reason {index % 40}", producer=each) for index, each in enumerate(many)]
    uses = drawn(1, *(use(f"d{each}", each) for each in many))
    node = one_node(*events, *refused, uses, step_made(1))
    views = contribution_views(node, {})
    assert len(views) == MAX_ROWS + 1 and views[-1].who == f"{500 - MAX_ROWS} others"
    assert sum(view.row.num_learned_from for view in views) == sum(view.row.num_refused for view in views) == 500
    assert sum(view.share for view in views) == pytest.approx(1.0)
    swarm = SwarmResult(nodes=(node,), began_at_s=0.0, first_step_at_s=0.0, ended_at_s=1.0)
    ((_, counts),) = sources_view(swarm).rows
    assert len(counts) == 1 + MAX_OUTSIDERS + 1 == len(sources_view(swarm).producers) and sum(counts) == 500
    (view,) = refusal_views(swarm)
    assert len(view.reasons) == 8 and view.reasons[-1] == "others"
    assert view.chart.count('text-anchor="middle"') <= NUM_BARS + 2


def test_the_time_in_which_a_node_did_not_run_is_not_in_its_speed() -> None:
    made = put("aa", num_tokens=60)
    started = NodeStarted(node_id=ADA)
    at_s = [(started, 0.0), (made, 10.0), (made, 20.0), (started, 5000.0), (made, 5020.0)]
    node = node_result("ada", ADA, (), [replace(event, at_s=s) for event, s in at_s], {})
    assert node.generating_s == 30.0 and node.tokens_generated == 180


def test_what_a_node_made_is_told_by_the_minute_also_where_it_does_not_learn() -> None:
    made = [(0.0, 0.25), (20.0, 0.75), (130.0, 1.0)]
    events = [put(f"a{at_s}", reward_mean=reward, num_tokens=30, at_s=6000.0 + at_s) for at_s, reward in made]
    node = node_result("ada", ADA, (), events, {}, trains=False)
    assert [(row.minute, row.num_groups, row.reward, row.num_tokens) for row in node.made] == [
        (100, 2, 0.5, 60),
        (102, 1, 1.0, 30),
    ]
    swarm = SwarmResult(nodes=(node,), began_at_s=6000.0, first_step_at_s=0.0, ended_at_s=6130.0)
    page = render_html(RunResult(title="a generator", swarm=swarm, invariants=()))
    assert "ada: 0.5 at 0 minutes" in page and "ada: 1 at 2 minutes" in page


def test_figures_that_are_not_finite_break_no_page() -> None:
    odd = make(PolicyEvaluated, step=1, accuracy=math.nan)
    node = one_node(put("aa", reward_mean=math.nan), odd, step_made(1, grad_norm=math.inf, loss=math.nan))
    assert (node.evaluations, node.num_generated, node.steps[0].grad_norm) == ((), 0, None)
    swarm = SwarmResult(nodes=(node,), began_at_s=0.0, first_step_at_s=1.0, ended_at_s=2.0)
    assert "nothing was measured" in render_html(RunResult(title="odd", swarm=swarm, invariants=()))


def test_a_line_of_many_steps_keeps_its_mean_and_its_extremes() -> None:
    points = [(float(x), 10.0 if x == 5000 else 1.0) for x in range(10_000)]
    chart = line_chart([Series(name="ada", points=points, color=0)], x_label="steps")
    dots = re.findall(r'<circle[^>]*cy="([\d.]+)"[^>]*data-tip="([^"]*)"', chart)
    assert len(dots) <= MAX_POINTS and "mean of 125" in dots[0][1]
    assert len(chart) < 60_000
    band = re.search(r'class="band s0" d="([^"]+)"', chart)
    assert band is not None
    highest = min(float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", band.group(1)))
    assert highest < min(float(y) for y, _ in dots), "a spike within a mean is seen"


def test_the_page_of_a_node_has_every_curve_and_no_foreign_markup(tmp_path: Path) -> None:
    name = '<script>alert(1)</script>\x1b[2J\u202e"onload="x'
    ada = node_directory(tmp_path / "ada", COURSE, name)
    result = NodeReports([ada]).read(0)
    assert result.holds, [verdict for verdict in result.invariants if not verdict.holds]
    hostile = Sample(
        actions=("<script>alert(2)</script>\x1b[31m\u202egnp.exe\u200f\x00",),
        observations=(),
        reward=0.5,
        reward_parts={"</td><b>": 1.0},
        finish="length",
        tokens=(),
    )
    group = SampledGroup(
        digest="ab" * 32,
        env="sort",
        task_id=1,
        producer=BELL,
        is_made_here=False,
        at_s=0.0,
        messages=(),
        reference="<img src=x>",
        samples=(hostile,) * 9,
    )
    node = replace(result.swarm.nodes[0], samples=(group,))
    page = render_html(replace(result, swarm=replace(result.swarm, nodes=(node,))))
    for title in (
        "Entropy",
        "<dt>learning rate</dt>",
        "Response length",
        "Responses cut off",
        "Gradient norm",
        "Mean age",
    ):
        assert title in page
    assert page.count("<script>") == 1 and "&lt;script&gt;alert(2)" in page and "1 more answers" in page
    assert not re.search("[\x00-\x08\x0b-\x1f\u200e\u200f\u202a-\u202e]", page)
    assert "<img" not in page and "</td><b>" not in page and 'onload="x' not in page
    assert not re.search(r"@import|url\(|https?://", page)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)
    assert "8.3 %" in page, "cut off: one of twelve"


def test_several_nodes_are_side_by_side_and_their_names_differ(tmp_path: Path) -> None:
    ada = node_directory(tmp_path / "one", COURSE, "ada")
    bell = node_directory(tmp_path / "two", [put("ba", BELL, num_tokens=4)], "ada", BELL)
    result = NodeReports([ada, bell]).read(0)
    assert [node.name for node in result.swarm.nodes] == [f"ada ({ada})", f"ada ({bell})"]
    assert result.holds and result.title.startswith("letters: ada")
    with pytest.raises(ConfigError, match="named twice"):
        NodeReports([ada, ada]).read(0)


def test_free_text_beside_paid_answers_is_shown_by_producer(tmp_path: Path) -> None:
    admitted = make(GroupAdmitted, digest="ba", producer=BELL, policy_id=BELL, via=BELL, free_text_share=0.25)
    ada = node_directory(tmp_path / "one", [put("aa"), admitted, drawn(1, use("aa"), use("ba", BELL)), step_made(1)])
    result = NodeReports([ada]).read(0)
    (node,) = result.swarm.nodes
    assert {row.producer: row.free_text_share for row in node.contributions} == {ADA: 0.0, BELL: 0.25}
    assert "<td>25.0 %</td>" in render_html(result)


def test_what_the_other_node_never_made_is_found_where_its_directory_is_there(tmp_path: Path) -> None:
    ada = node_directory(tmp_path / "one", COURSE)
    bell = node_directory(tmp_path / "two", [put("zz", BELL, num_tokens=4)], "bell", BELL)
    alone = NodeReports([ada]).read(0)
    assert alone.holds, "alone it cannot know"
    (admitted,) = [verdict for verdict in alone.invariants if verdict.name == ADMITTED]
    assert admitted.detail.endswith("of nodes whose events are not here")
    (violated,) = [verdict for verdict in NodeReports([ada, bell]).read(0).invariants if not verdict.holds]
    assert violated.name == ADMITTED and "its producer never made it" in violated.detail


@pytest.mark.parametrize(("digest", "producer", "holds"), [("ee", "e" * 64, True), ("ff", BELL, False)])
def test_a_simulation_tells_a_stranger_that_joined_from_a_forgery(digest: str, producer: str, holds: bool) -> None:
    events = (put("aa"), admitted(digest, producer), drawn(1, use("aa"), use(digest, producer)), step_made(1))
    nodes = [
        NodeRun(name=name, node_id=node_id, roles=(), curriculum=(), events=of, status={}, num_starts=1)
        for name, node_id, of in (("ada", ADA, events), ("bell", BELL, (put("ba", BELL),)))
    ]
    options = SimulationOptions(preset="tiny", nodes=2)
    run = SwarmRun(options=options, title="", nodes=tuple(nodes), began_at_s=0.0, first_step_at_s=0.0, ended_at_s=9.0)
    verdicts = {verdict.name: verdict for verdict in judge([run]).verdicts()}
    assert verdicts[ADMITTED].holds is holds
    assert verdicts[ADMITTED].detail == "1 of nodes whose events are not here" or not holds


def test_a_log_whose_beginning_is_gone_proves_nothing_that_stood_there(tmp_path: Path) -> None:
    rest: list[Event] = [EarlierRefusals(refused={}), drawn(9, use("aa"), use("ba", BELL)), step_made(9)]
    lost = node_directory(tmp_path / "lost", rest)
    verdicts = {verdict.name: verdict.holds for verdict in NodeReports([lost]).read(0).invariants}
    assert verdicts[ADMITTED] and verdicts[EXISTED]
    whole = node_directory(tmp_path / "whole", [*rest[1:], LoopFailed(loop="learn", error="KeyError: 1")])
    verdicts = {verdict.name: verdict.holds for verdict in NodeReports([whole]).read(0).invariants}
    assert not verdicts[ADMITTED] and not verdicts[NO_FAILURE]
    assert "beginning of its event log is gone" in render_html(NodeReports([lost]).read(0))


def test_a_damaged_log_and_a_directory_with_nothing_else_are_read(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    lines = [json.dumps(to_json(event)).encode() for event in COURSE]
    damaged = b'\n{"kind":"pu\n\xff\xfe\n[1]\n{"kind":"step","step":"<b>"}\n'
    (bare / EVENTS).write_bytes(b"\n".join(lines) + damaged + b'{"kind":"half')
    result = NodeReports([bare]).read(3)
    assert len(result.swarm.nodes[0].steps) == 1 and result.swarm.nodes[0].num_generated == 3
    assert "bare" in render_html(result)


def test_the_command_writes_a_page_and_says_what_is_wrong(tmp_path: Path) -> None:
    directory = tmp_path / "trained"
    make_trained_node(directory)
    done = RUN.invoke(app, ["report", "--dir", str(directory)])
    assert done.exit_code == 0, done.output
    page = (directory / "report.html").read_text()
    assert "letters: trained" in page and "does not run" in done.output
    assert OTHER[:8] in page, "who it learned from"
    for arguments, words in (
        (["--dir", str(tmp_path)], "no events.jsonl"),
        (["--dir", str(directory), "--out", str(tmp_path / "no" / "x.html")], "cannot be written"),
    ):
        failed = RUN.invoke(app, ["report", *arguments])
        assert failed.exit_code == 2 and words in failed.stderr and "Traceback" not in failed.output


def test_a_control_stands_beside_the_claim(tmp_path: Path) -> None:
    def course(right: int) -> list[Event]:
        return [evaluated(0, (0,) * 32), evaluated(9, (1,) * right + (0,) * (32 - right))]

    shared = node_directory(tmp_path / "shared", [NodeStarted(node_id=ADA, release="1, commit ab"), *course(30)])
    silo = node_directory(tmp_path / "silo", course(4), node_id=BELL)
    done = RUN.invoke(app, ["report", str(shared), "--compare", str(silo)])
    assert done.exit_code == 0 and done.stdout.startswith("ada: learned: held out 0.00 -> 0.94 of 32 problems"), done
    page = (shared / "report.html").read_text()
    assert "Against the directories of --compare" in page and "+0.81 (" in page and "1, commit ab" in page
    failed = RUN.invoke(app, ["report", str(shared), "--compare", str(shared)])
    assert failed.exit_code == 2 and "the same directory" in failed.stderr


def test_memory_grows_with_steps_and_groups_and_not_with_events(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    line = json.dumps(to_json(GroupRefused(reason="duplicate", producer=BELL, at_s=1000.0))) + "\n"
    path.write_text(line * 20_000)
    assert path.stat().st_size > 1_500_000
    tracemalloc.start()
    try:
        tally = NodeTally()
        for event in EventTail(path).stream():
            tally.add(event)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tally.result("ada").refusals == {"duplicate": 20_000}
    assert peak < 500_000
