"""Status file of a node: read, shown as rows, and checked for what keeps the node from making progress.

Invariant: works on a running, stopped or crashed node alike: it only reads `<dir>/status.json`, and whether a process
holds the directory (`swarm.process.is_running`).
"""

import json
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError, Unavailable
from swarm.process import is_running
from swarm.types import JsonDict, short

STATUS = "status.json"  # in the directory of a node
STALE_AFTER_S = 15.0  # the daemon writes the file every second
MANY_IN_VAIN: Final = 100  # own groups without signal; with one right answer in 100 and 8 tries a group: 1 in 3,000
_NEEDED: Final = ("node_id", "at_s", "last_step_at_s", "pid", "step", "num_failures", "advice")


def read_status(directory: Path) -> JsonDict:
    """The newest status of the node that lives in `directory`.

    Raises:
        ConfigError: there is none, or it is damaged; names the directory and the fix.
        Unavailable: the node is starting.
    """
    path = directory / STATUS
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_running(directory):
            raise Unavailable(f"{directory}: the node is starting; its status comes in some seconds") from None
        raise ConfigError(f"{path}: no status; is {directory} the directory of a node that was started?") from None
    except NotADirectoryError:
        raise ConfigError(f"{directory} is a file; give the directory of a node") from None
    except PermissionError:
        raise ConfigError(f"{path}: only the user who runs the node may read it") from None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); start the node again") from None
    missing = [key for key in _NEEDED if key not in status] if isinstance(status, dict) else list(_NEEDED)
    if missing:
        raise ConfigError(f"{path}: damaged (no {', '.join(missing)}); start the node again")
    return status


def status_rows(status: JsonDict) -> list[tuple[str, str]]:
    """What `swarm status` shows, as name and value; ids are whole, so that they can be copied."""
    shown = [(key, str(status.get(key, ""))) for key in ("name", "node_id", "run_id")]
    shown.append(("step", f"{status['step']}{' (finished: every step is made)' if status.get('is_finished') else ''}"))
    following = status.get("following")
    if following is not None:
        shown.append(("follows", _describe_following(following)))
    if status.get("published_step") is not None:
        shown.append(("published", f"step {status['published_step']}, to {', '.join(status['followers']) or 'nobody'}"))
    alone = "none: this node is alone" if following is None else "none"
    standing = status.get("standing", {})
    peers = [f"{peer} ({standing[peer]})" if standing.get(peer) else peer for peer in status.get("peers", [])]
    shown.append(("peers", ", ".join(peers) or alone))
    if status.get("dht"):
        shown.append(("bootstrap", ", ".join(status["dht"])))
    answers = {None: "none", True: "answers", False: "does not answer; the node goes on without it"}
    refusal = status.get("coordinator_refusal")
    shown.append(("coordinator", refusal or answers[status.get("is_coordinator_reachable")]))
    if waiting := waits_for(status):
        shown.append(("waits for", waiting))
    if set_aside := all_set_aside(status):
        shown.append(("guard", set_aside))
    if status.get("clock"):
        shown.append(("clock", status["clock"]))
    if "who_counts" in status:
        shown.append(("counts in full", status["who_counts"]))
    if "environments" in status:
        shown.append(("episodes", ", ".join(f"{name} {kind}" for name, kind in status["environments"].items())))
    counts = ("num_local_used", "num_external_used", "num_set_aside", "num_entry_refused", "refusals", "evaluations")
    return shown + [(key, str(status.get(key, ""))) for key in counts]


def _describe_following(following: JsonDict) -> str:
    if not following["policy"]:
        candidates = [*following["candidates"], *following["trainers_without_weights"]]
        return f"nobody (trainers: {', '.join(candidates) or 'none'})"
    connected = "connected" if following["is_trainer_connected"] else "not connected"
    if following["served_step"] is None:
        return f"{following['policy']} ({connected}; no version was taken yet)"
    steps = f"step {following['served_step']} is served, {following['head_step']} is the newest"
    return f"{following['policy']} ({connected}; {steps})"


def problems(status: JsonDict, now_s: float, max_idle_s: float, runs: bool = True) -> list[str]:
    """Why the node is not making progress; empty when it is.

    Args:
        status: as read by `read_status`.
        now_s: wall clock.
        max_idle_s: longest time without an optimizer step.
        runs: what `is_running` says of its directory.
    """
    causes: list[str] = []
    unwritten_s = now_s - status["at_s"]
    if not runs and status.get("is_finished"):
        return []  # it ended as it should
    if not runs:
        causes.append(
            f"the node does not run: it stopped or was killed {unwritten_s:.0f} s ago (pid was {status['pid']})"
        )
    elif unwritten_s > STALE_AFTER_S:
        causes.append(f"the node wrote nothing for {unwritten_s:.0f} s: it hangs (pid {status['pid']})")
    idle_s = now_s - status["last_step_at_s"]
    following = status.get("following")
    if idle_s > max_idle_s and not status.get("is_finished"):
        what = "optimizer step" if following is None else "group"
        known = "; ".join(filter(None, (all_set_aside(status), waits_for(status))))
        why = f": {known}" if known else ""
        causes.append(f"no {what} for {idle_s:.0f} s (limit {max_idle_s:.0f} s), at step {status['step']}{why}")
    elif not status.get("is_finished") and _num_in_vain(status) >= MANY_IN_VAIN:
        causes.append(f"waits for {waits_for(status)}")
    if following is not None:
        causes += _following_problems(following)
    if status["num_failures"]:
        causes.append(f"{status['num_failures']} loops failed unexpectedly; see the log")
    if status.get("is_store_full"):
        causes.append("groups of this node are dropped: the disk has no room for them; make room")
    if status.get("num_events_lost"):
        causes.append(f"{status['num_events_lost']} events could not be written: is the disk full?")
    if status["advice"] == "alarm":
        causes.append("the coordinator's alarm: late groups are far off-policy everywhere (local limits still hold)")
    return causes


def all_set_aside(status: JsonDict) -> str:
    """That the guard set every source of the newest draws aside, by which figures, and what is used; "" otherwise."""
    figures = status.get("guard")
    if not figures:
        return ""
    measured = ", ".join(
        f"{words} {figures[name]:.3g}"
        for name, words in (("mismatch_kl_k3", "mismatch KL"), ("ess_share", "ESS share"))
        if name in figures
    )
    draws = f"{figures['guard_idle_draws']:.0f} in a row"
    note = f"all sources of the newest draws ({draws}) set aside: {measured or 'too far off policy'}"
    used = figures.get("guard_groups_spared")
    return f"{note}; {used:.0f} groups that deviate least are used, with capped ratios" if used else note


def waits_for(status: JsonDict) -> str:
    """Which groups the learner waits for, where none of those that came let it make a step; "" otherwise."""
    own = status.get("own_since_step")
    if own is not None:
        made = own["num_put"] + own["num_unscored"]
        if not made or own["num_with_signal"]:
            return ""
        unscored = f", {own['num_unscored']} not scored ({own['error']})" if own["num_unscored"] else ""
        return f"own groups: {made} generated, 0 with differing rewards{unscored}"
    if not status.get("learns_from_others") or status.get("num_admitted"):
        return ""
    refusals = status["refusals"]
    if not refusals:
        return "groups of others: none came"
    most = max(refusals, key=refusals.__getitem__)
    return f"groups of others: 0 admitted, {sum(refusals.values())} refused (mostly {most})"


def _num_in_vain(status: JsonDict) -> int:
    own = status.get("own_since_step")
    return 0 if own is None or own["num_with_signal"] else own["num_put"] + own["num_unscored"]


def _following_problems(following: JsonDict) -> list[str]:
    causes: list[str] = []
    candidates, without_weights = following.get("candidates"), following["trainers_without_weights"]
    if candidates:
        names = ", ".join(map(short, candidates))
        causes.append(
            f"the run has {len(candidates)} trainers ({names}): set follow.policy to the id of the one to follow"
        )
    elif not following["policy"] and without_weights:
        names = ", ".join(map(short, without_weights))
        causes.append(f"no trainer publishes weights (there is {names}): on the trainer set weights.publish=true")
    elif not following["policy"]:
        causes.append("no trainer is in the directory: nobody to follow (follow.policy names one)")
    elif following["policy"] in without_weights and following["served_step"] is None:
        causes.append(f"the trainer {short(following['policy'])} publishes no weights: set weights.publish=true there")
    elif not following["is_trainer_connected"]:
        causes.append(f"the trainer {short(following['policy'])} does not answer: generation waits for its credit")
    if following["last_error"]:
        served = following["served_step"]
        causes.append(f"the engine did not take a version and serves step {served} on: {following['last_error']}")
    return causes
