"""The report of a simulation: figures derived from events, and the files that show them."""

import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import ADA, BELL, make
from rich.console import Console

from swarm.episode import EpisodeOutcome, Message, Transition, TurnStatus
from swarm.events import (
    ApplyFailed,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    NodeKilled,
    NodeRestored,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
)
from swarm.pages.charts import ticks
from swarm.report.episode_views import environment_views
from swarm.report.figures import (
    accuracy_curve,
    advantage_over_rival,
    environments_of,
    follow_rows,
    happenings,
    largest_gap_s,
    mean_change,
    node_rows,
    shared_step,
    step_at,
    step_curve,
)
from swarm.report.html import as_json, render_html, write_report
from swarm.report.invariants import InvariantVerdict
from swarm.report.live import PLAIN_EVERY_S, LiveProgress, figure
from swarm.report.result import NodeResult, RunResult, SwarmResult
from swarm.report.tally import node_result
from swarm.report.terminal import render_summary, table_of
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.types import EdgeReport


def step_event(step: int, at_s: float, reward: float = 0.5, **more: Any) -> StepMade:
    edge = EdgeReport(source=BELL, num_groups=1, age_mean_steps=2.0, ess_share=0.7, mismatch_kl=0.03, reward_mean=0.5)
    given: dict[str, Any] = {
        "step": step,
        "draw_step": step,
        "diagnostics": {"reward_mean": reward, "ess_share": 0.8, "mismatch_kl_k3": 0.02, "age_mean_steps": 1.0},
        "seconds": {"draw_wait": 0.5, "score": 1.0, "backward": 2.0, "generate": 2.0, "learn": 4.0, "both": 1.0},
        "ages_steps": (0, 2),
        "num_local": 1,
        "num_external": 1,
        "edges": (edge,),
    }
    return make(StepMade, at_s=at_s, **{**given, **more})


def draw_event(step: int) -> GroupsDrawn:
    others = {"producer": BELL, "policy_id": BELL, "is_own_policy": False}
    own = make(GroupUse, digest=f"l{step}", age_steps=0)
    external = make(GroupUse, digest=f"f{step}", **others, age_steps=2, in_flight_steps=1)
    return make(GroupsDrawn, draw_step=step, num_zero_variance=1, groups=(own, external))


def evaluation_event(step: int, env: str, accuracy: float, split: str = "all") -> PolicyEvaluated:
    return make(PolicyEvaluated, at_s=100.0 + step, step=step, env=env, split=split, accuracy=accuracy)


def put(step: int, **changes: Any) -> GroupPut:
    return make(GroupPut, **{"at_s": 100.0 + step, "digest": f"l{step}", "env": "sums", "num_tokens": 40, **changes})


def admitted(step: int, **changes: Any) -> GroupAdmitted:
    given = {"at_s": 100.0 + step, "digest": f"f{step}", "env": "sums", "via": BELL, **changes}
    return make(GroupAdmitted, **given)


def events(gain: float = 0.5) -> list[Event]:
    made: list[Event] = [NodeStarted(at_s=99.0, node_id=ADA)]
    for split in ("all", "held_out"):
        made += [evaluation_event(0, env, 0.2, split) for env in ("sums", "products")]
    for step in (1, 2, 3):
        made += [
            put(step),
            admitted(step),
            draw_event(step),
            step_event(step, 100.0 + 10 * step, reward=0.1 * step),
        ]
    for split in ("all", "held_out"):
        made += [evaluation_event(3, env, 0.2 + gain, split) for env in ("sums", "products")]
    return [*made, GroupRefused(at_s=120.0, reason="too_old", producer=BELL)]


STATUS = {"bytes_received": 2000, "bytes_sent": 900}


def node(name: str = "ada", gain: float = 0.5, curriculum: tuple[str, ...] = ("sums",)) -> NodeResult:
    return node_result(name, ADA if name == "ada" else BELL, curriculum, events(gain), STATUS)


def swarm(gain: float = 0.5) -> SwarmResult:
    nodes = (node("ada", gain), node("bell", gain, ("products",)))
    return SwarmResult(nodes=nodes, began_at_s=50.0, first_step_at_s=110.0, ended_at_s=170.0)


def result(**changes: object) -> RunResult:
    given: dict[str, object] = {
        "title": "two nodes",
        "swarm": swarm(),
        "rival": swarm(gain=0.25),
        "invariants": (InvariantVerdict(name="no group twice", holds=True, detail="12 groups"),),
        "options": {"seed": 3},
    }
    return RunResult(**{**given, **changes})  # type: ignore[arg-type]


def test_a_node_is_read_from_its_events():
    ada = node()
    assert [row.step for row in ada.steps] == [1, 2, 3]
    assert (ada.num_local, ada.num_external, ada.num_zero_variance) == (3, 3, 3)
    assert ada.sources == {ADA: 3, BELL: 3}
    assert ada.ages == {0: 3, 2: 3}
    assert ada.ages_in_flight == ada.ages_in_queue == {0: 3, 1: 3}
    assert ada.refusals == {"too_old": 1}
    assert (ada.tokens_generated, ada.bytes_useful, ada.bytes_received) == (120, 1500, 2000)
    assert ada.seconds["backward"] == 6.0
    assert ada.edges_kl == {BELL: 0.03}


def test_groups_that_followers_made_count_as_local_and_on_their_own():
    group = make(GroupUse, producer=BELL)
    ada = node_result("ada", ADA, (), [replace(draw_event(1), groups=(group,))], {})
    assert (ada.num_local, ada.num_from_followers, ada.num_external) == (1, 1, 0)


def test_groups_that_the_guard_left_out_are_not_counted_as_learned_from():
    left_out = {"guard_groups_left_out": 1.0}
    partly = step_event(1, 110.0, num_external=0, edges=(), diagnostics=left_out)
    measured = step_event(1, 120.0, draw_step=2, was_skipped=True, diagnostics={"guard_groups_left_out": 2.0})
    ada = node_result("ada", ADA, (), [draw_event(1), partly, draw_event(2), measured], {})
    assert (ada.num_local, ada.num_external, ada.num_set_aside) == (1, 0, 3)
    assert ada.sources == {ADA: 1} and ada.ages == {0: 1}
    both = SwarmResult(nodes=(ada,), began_at_s=50.0, first_step_at_s=110.0, ended_at_s=170.0)
    page = render_html(result(swarm=both, rival=None))
    assert "<b>1</b><span>own groups learned from</span><small>3 set aside" in page
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render_summary(result(swarm=both, rival=None)))
    assert "set aside (drawn, not learned from): ada 3" in console.export_text()
    far = SwarmResult(nodes=(replace(ada, edges_kl={ADA: 0.14}),), began_at_s=50.0, first_step_at_s=1, ended_at_s=170.0)
    console.print(render_summary(result(swarm=far, rival=None)))
    assert "up to 0.14 nats a token (KL)" in " ".join(console.export_text().split()), "why, and what to change"


def test_of_two_sources_the_one_with_an_edge_was_learned_from():
    draw = draw_event(1)
    other = replace(draw.groups[1], digest="x", producer="c" * 64, policy_id="c" * 64, age_steps=0)
    step = step_event(1, 110.0, diagnostics={"guard_groups_left_out": 1.0})
    ada = node_result("ada", ADA, (), [replace(draw, groups=(*draw.groups, other)), step], {})
    assert ada.sources == {ADA: 1, BELL: 1} and ada.num_set_aside == 1


def test_a_step_repeated_after_a_restart_counts_once_as_it_was_made_last():
    again = [*events(), draw_event(3), step_event(3, 200.0, reward=0.9), NodeRestored(at_s=190.0)]
    ada = node_result("ada", "", (), again, {}, num_starts=2)
    assert [row.step for row in ada.steps] == [1, 2, 3]
    assert ada.steps[-1].reward == 0.9
    assert ada.num_local == 3
    assert ada.node_id == ADA and ada.curriculum == ("sums",)
    assert ada.marks == ((190.0, "restored"),)


def test_a_skipped_step_hides_no_other():
    skipped = step_event(2, 125.0, reward=0.7, was_skipped=True, loss=math.nan, grad_norm=math.nan, draw_step=3)
    third = step_event(3, 130.0, reward=0.3, draw_step=4)
    before = [event for event in events() if not isinstance(event, StepMade) or event.step < 3]
    ada = node_result("ada", ADA, ("sums",), [*before, skipped, third], STATUS)
    assert [(row.draw, row.step, row.was_skipped) for row in ada.steps] == [
        (1, 1, False),
        (2, 2, False),
        (3, 2, True),
        (4, 3, False),
    ]
    assert [row.reward for row in ada.steps] == [0.1, 0.2, 0.7, 0.3]
    assert node_rows(replace(swarm(), nodes=(ada,)))[0].num_steps == 3
    assert len(step_curve(ada, "reward")) == 4 and len(step_curve(ada, "loss")) == 3


def test_a_curve_has_a_point_only_where_every_environment_was_measured():
    partial = node_result("ada", ADA, ("sums",), [*events(), evaluation_event(7, "sums", 1.0)], {})
    assert accuracy_curve(partial, ("sums", "products"), "all") == [(0, 0.2), (3, 0.7)]
    assert accuracy_curve(partial, ("sums",), "all")[-1] == (7, 1.0)
    assert accuracy_curve(partial, (), "all") == []


def test_rows_tell_own_tasks_from_others_and_mean_age():
    row = node_rows(swarm())[0]
    assert row.num_steps == 3
    assert row.other["all"] is not None and row.other["all"].gain == pytest.approx(0.5)
    assert row.own["held_out"] is not None and row.own["held_out"].num_problems == 64
    assert row.age_mean_steps == 1.0
    assert row.ess_share == pytest.approx(0.8)
    assert row.tokens_per_s == pytest.approx(120 / 29)  # tokens, and seconds from its first group to its last event
    assert row.overlap_share == pytest.approx(0.5)
    assert environments_of(swarm(), node(), own=False) == ("products",)


def test_sharing_and_silo_are_compared_at_the_last_common_step():
    assert shared_step(result()) == 3
    assert advantage_over_rival(result(), "all", own=False) == pytest.approx(0.25)
    assert advantage_over_rival(result(rival=None), "all", own=False) is None


def test_a_mean_over_nodes_exists_only_when_every_node_has_it():
    found = mean_change(swarm(), "all", own=True)
    assert found is not None and (found.before, found.after) == (pytest.approx(0.2), pytest.approx(0.7))
    bare = node_result("bell", BELL, ("products",), [], {})
    one_is_missing = SwarmResult(nodes=(node(), bare), began_at_s=0, first_step_at_s=0, ended_at_s=60)
    assert mean_change(one_is_missing, "all", own=True) is None


def test_step_curves_run_over_steps():
    assert step_curve(node(), "reward") == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3))]
    assert [step_at(node(), at_s) for at_s in (109.0, 125.0, 999.0)] == [0, 2, 3]
    assert largest_gap_s(node()) == 10.0


def test_what_explains_a_curve_is_marked_where_it_happened():
    spike = {"reward_mean": 0.5, "ess_share": 0.4, "mismatch_kl_k3": 1.75, "age_mean_steps": 1.0}
    made = [*events(), draw_event(4), step_event(4, 140.0, diagnostics=spike), NodeKilled(at_s=145.0)]
    made += [draw_event(5), step_event(4, 150.0, draw_step=5, was_skipped=True)]
    ada = node_result("ada", ADA, ("sums",), made, STATUS)
    words = [words for _, words in happenings(ada)]
    assert words == ["2 groups set aside", "KL 1.8 nats a token, ESS 0.4", "killed", "step skipped"]
    assert {step for step, _ in happenings(ada)} == {4}
    page = render_html(result(swarm=replace(swarm(), nodes=(ada,)), rival=None))
    assert page.count('data-tip="ada, step 4: 2 groups set aside; KL 1.8') >= 5, "in every chart over steps"
    assert "<b>ada</b>" in page[page.index("What happened") :], "and in words, as a tip needs a mouse"


def test_the_page_is_self_contained_and_its_charts_are_well_formed():
    page = render_html(result())
    assert not re.search(r"""src\s*=|href="[^#]|@import|url\(|https?://""", page)
    targets = set(re.findall(r'href="#(\w+)"', page))
    assert len(targets) >= 5 and targets <= set(re.findall(r'id="(\w+)"', page))
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) >= 9
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "0.20 -&gt; 0.70 of 128 problems" in page and "too_old" in page and "<dt>seed</dt><dd>3</dd>" in page
    assert page.index("Did it learn?") < page.index("<dl") < page.index('id="invariants"')
    ahead = page[page.index("Against the same nodes without sharing") : page.index("<dl")]
    assert ahead.count("+0.25 (") == 4 and ahead.count('class="interval good"') == 4


def test_a_violated_invariant_is_shown_with_its_detail():
    verdict = InvariantVerdict(name="no group twice", holds=False, detail="ada: draw 3 was made twice")
    page = render_html(result(invariants=(verdict,)))
    assert "an invariant is violated" in page and "ada: draw 3 was made twice" in page


def test_a_run_without_any_event_still_has_a_report(tmp_path: Path):
    empty = SwarmResult(nodes=(node_result("ada", "", (), [], {}),), began_at_s=0, first_step_at_s=0, ended_at_s=0)
    given = RunResult(title="nothing", swarm=empty, invariants=())
    paths = write_report(given, tmp_path / "new")
    assert "nothing was measured" in paths["html"].read_text()
    Console(file=io.StringIO()).print(render_summary(given))


def test_report_files_hold_the_same_figures(tmp_path: Path):
    paths = write_report(result(), tmp_path)
    data = json.loads(paths["json"].read_text())
    assert data["derived"]["advantage_over_rival"]["other/all"] == pytest.approx(0.25)
    assert data["derived"]["swarm"]["mean_change"]["own/all"]["after"] == pytest.approx(0.7)
    assert data["result"]["swarm"]["nodes"][0]["steps"][2]["step"] == 3
    assert data["result"]["options"] == {"seed": 3}


def test_figures_that_are_not_finite_become_null_in_json(tmp_path: Path):
    odd = node_result("ada", ADA, ("sums",), [step_event(1, 1.0, loss=math.nan)], {})
    given = result(
        swarm=SwarmResult(nodes=(odd,), began_at_s=0, first_step_at_s=1, ended_at_s=float("nan")), rival=None
    )
    text = write_report(given, tmp_path)["json"].read_text()
    assert "NaN" not in text and json.loads(text)["result"]["swarm"]["nodes"][0]["steps"][0]["loss"] is None
    assert as_json(given)["derived"]["shared_step"] is None


def test_the_summary_fits_a_terminal_and_says_what_matters():
    console = Console(width=80)
    with console.capture() as captured:
        console.print(render_summary(result()))
    text = captured.get()
    assert text.count(".20\N{RIGHTWARDS ARROW}.70") == 8 and text.count(".20\N{RIGHTWARDS ARROW}.45") == 8
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "swarm minus silo at step 3, other tasks: +0.25 all, +0.25 held out" in text
    assert "products all .10 (n=64)" in text and "ok" in text and "no group twice" in text


def test_the_widest_figures_fit_80_columns():
    row = replace(
        node_rows(swarm(gain=0.8))[1], num_local=250, num_external=250, age_mean_steps=1.25, tokens_per_s=1234
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table_of([row], "wide"))
    assert "\N{HORIZONTAL ELLIPSIS}" not in captured.get() and ".20\N{RIGHTWARDS ARROW}1.00" in captured.get()
    assert "products" in captured.get() and "250/250" in captured.get() and "1234" in captured.get()


def test_progress_without_a_terminal_is_one_line_per_interval(tmp_path: Path):
    now = [0.0]
    with (tmp_path / "out").open("w") as file:
        console = Console(file=file, width=400)
        with LiveProgress(console, "two [nodes]", {"ada": ("sums",)}, 30, monotonic_s=lambda: now[0]) as live:
            for event in events():
                live.watch("ada", event)
            now[0] = PLAIN_EVERY_S
            live.tick()
            live.tick()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "two [nodes]" and len(lines) == 3
    assert lines[1].startswith("0:09  ada step 3 of 30 age 1.0 local/ext 3/3 reward .30 own .70 other .70 ESS .80")


def test_progress_on_a_terminal_shows_a_row_per_node():
    live = LiveProgress(Console(force_terminal=True, width=160), "run", {"ada": ("sums",), "bell": ("products",)}, 30)
    for event in events():
        live.watch("ada", event)
    live.watch("bell", NodeKilled(at_s=1.0))
    console = Console(width=160)
    with console.capture() as captured:
        console.print(live.table())
    text = captured.get()
    assert re.search(r"ada +. learning . 3/30 +.+1\.0 . +3/3 . +\.30", text)
    assert re.search(r"bell +. killed", text)


@pytest.mark.parametrize(
    ("value", "text"), [(0.714, ".71"), (-0.5, "-.50"), (1.0, "1.00"), (None, "-"), (math.nan, "-"), (10.04, "10.04")]
)
def test_figures_are_short(value: float | None, text: str):
    assert figure(value) == text


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    assert all(3 <= tick <= 47 for tick in ticks(3, 47))


def test_how_a_generator_followed_is_counted_from_the_end_of_the_step():
    def applied(step: int, at_s: float, num_bytes: int) -> VersionApplied:
        seconds = {"stage": 0.2, "load": 0.3, "pause": 0.1}
        return VersionApplied(
            at_s=at_s, policy_id=ADA, step=step, digest="d", num_bytes=num_bytes, seconds=seconds, mismatch_nats=0.01
        )

    taken = [applied(0, 90.0, 9000), applied(1, 102.5, 400), applied(3, 124.0, 600)]
    failed = ApplyFailed(at_s=1.0, policy_id=ADA, step=1, digest="d", error="canary differs")
    follower = node_result("curie", BELL, (), [*taken, failed], {}, trains=False)
    trainer = node_result(
        "ada", ADA, (), [step_event(step, 100.0 + 10 * step - 8, seconds={"publish": 0.5}) for step in (1, 2, 3)], {}
    )
    both = SwarmResult(nodes=(trainer, follower), began_at_s=0.0, first_step_at_s=1.0, ended_at_s=130.0)
    (row,) = follow_rows(both)
    assert (row.name, row.num_versions, row.num_not_taken, row.first_bytes) == ("curie", 3, 1, 9000)
    assert row.bytes_per_version == 500 and row.pause_s == pytest.approx(0.1)
    assert row.lag_s == pytest.approx((1.0 + 2.5) / 2) and row.lag_p95_s == pytest.approx(2.5)
    given = result(swarm=both, rival=None)
    assert "How generators followed" in render_html(given)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render_summary(given))
    assert "How generators followed" in captured.get() and "curie" in captured.get()


def played(step: int, env: str, rewards: tuple[float, ...], said: str = "?abc") -> ShownEpisode:
    heard = (Message(role="user", content=">def="),)
    turns = [Transition(messages=heard, reward=reward, state_key="abc") for reward in rewards]
    outcome = float(sum(rewards) > 0)
    end = Transition(is_end=True, rewards={"outcome": outcome}, status=TurnStatus.OK)
    return ShownEpisode(
        step=step,
        env=env,
        task_id=7,
        opening=(Message(role="user", content="get:abc="),),
        actions=(*(said for _ in turns), "ghi"),
        outcome=EpisodeOutcome(reward=outcome, transitions=(*turns, end)),
        reference="ghi",
        num_tries=4,
        num_right=int(4 * outcome),
    )


def episodes_result(said: str = "?abc") -> RunResult:
    shown = [
        played(step, env, (reward,), said) for step, reward in ((3, 0.5), (0, 0.0)) for env in ("products", "sums")
    ]
    ada = node_result("ada", ADA, ("sums",), events(), STATUS, episodes=shown)
    bell = node_result("bell", BELL, ("products",), events(), STATUS)
    both = SwarmResult(nodes=(ada, bell), began_at_s=50.0, first_step_at_s=110.0, ended_at_s=170.0)
    return result(swarm=both, num_tries=4)


def test_groups_are_counted_by_environment_and_by_whose_they_were():
    ada = node()
    assert ada.learned_from == {"sums": (3, 3)}, "three own groups and three of bell's, by the events of ada"
    unknown = node_result("ada", ADA, (), [draw_event(1)], {})
    assert unknown.learned_from == {}, "no event says where they are from"


def test_groups_of_the_own_policy_are_told_apart_by_turns_and_by_what_became_of_them() -> None:
    made: list[Event] = [NodeStarted(at_s=99.0, node_id=ADA)]
    made += [put(number, num_turns=1 + number % 2) for number in range(1, 5)]
    made += [
        admitted(5, digest="theirs", producer=BELL, num_turns=2),
        admitted(6, digest="foreign", producer=BELL, policy_id=BELL),
        replace(draw_event(1), zero_variance=("l2",), too_old=("l3", "theirs")),
    ]
    ada = node_result("ada", ADA, ("sums",), made, STATUS | {"environments": {"sums": "replayable"}})
    assert [(row.num_turns, row.num_made, row.num_learned_from) for row in ada.by_turns] == [(1, 2, 0), (2, 3, 1)]
    assert [(row.num_without_signal, row.num_too_old) for row in ada.by_turns] == [(1, 0), (0, 2)]
    skipped = node_result("ada", ADA, (), [*made, step_event(1, 110.0, was_skipped=True)], {})
    assert [row.num_learned_from for row in skipped.by_turns] == [0, 0], "drawn, and set aside"
    swarm_of_one = SwarmResult(nodes=(ada,), began_at_s=50.0, first_step_at_s=110.0, ended_at_s=170.0)
    page = render_html(result(swarm=swarm_of_one, rival=None))
    assert "Groups by turns" in page and "66.7 %" in page
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render_summary(result(swarm=swarm_of_one, rival=None)))
    assert "40.0% of the groups of its own policy were too old" in console.export_text()


def test_episodes_are_shown_before_and_after_own_and_foreign_ones():
    views = {view.env: view for view in environment_views(episodes_result())}
    assert list(views) == ["products", "sums"]
    (bell, ada) = views["products"].nodes
    assert (bell.name, bell.is_own, bell.problems) == ("bell", True, ()) and (ada.name, ada.is_own) == ("ada", False)
    (problem,) = ada.problems
    assert [(each.step, each.succeeded, each.all_tries) for each in problem.tries] == [
        (0, False, "0 of 4 tries succeed"),
        (3, True, "4 of 4 tries succeed"),
    ]
    assert [(turn.text, turn.reward) for turn in problem.tries[1].turns] == [("?abc", 0.5), ("ghi", 0.0)]
    assert views["products"].is_open(ada) and not views["products"].is_open(bell)
    assert ada.held_out is not None and ada.rival_held_out is not None
    page = render_html(episodes_result())
    assert "which never generates it" in page and "sampled, mean of 4 tries" in page and "+.50" in page


def test_calls_and_roles_and_new_conversations_are_told_apart():
    call = '<tool_call>{"name": "search", "arguments": {"query": "Ada <b>"}}</tool_call>'
    opened = Transition(messages=(Message(role="user", content="go on"),), conversation=1, role="writer")
    plain = played(0, "products", (0.5,), call)
    episode = replace(plain, outcome=replace(plain.outcome, transitions=(opened, plain.outcome.transitions[1])))
    ada = node_result("ada", ADA, ("sums",), events(), STATUS, episodes=[episode])
    (view,) = [
        each for each in environment_views(result(swarm=replace(swarm(), nodes=(ada,)))) if each.env == "products"
    ]
    first, last = view.nodes[0].problems[0].tries[0].turns
    assert (first.calls, first.who, first.opens) == (('search(query="Ada <b>")',), "writer", True)
    assert (last.calls, last.who, last.opens) == ((), "model", False)


def test_a_model_cannot_put_markup_into_the_page_or_move_the_cursor_of_a_terminal():
    given = episodes_result(said="[red]<script>alert(1)</script>\x1b[2J\x07")
    page = render_html(given)
    assert "<script>alert" not in page and "\x1b" not in page
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(render_summary(given))
    text = captured.get()
    assert "\x1b" not in text and "\x07" not in text and "[red]" in text
    assert "An episode of products, which ada never generates" in text
    assert all(len(line) <= 80 for line in text.splitlines())
