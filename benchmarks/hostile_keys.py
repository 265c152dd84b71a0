"""Accuracy lost to 30 % of hostile keys: every attack alone and all at once, against honest runs.

    python -m benchmarks.hostile_keys --presets echo-tiny --attacks all       # about 10 minutes
    python -m benchmarks.hostile_keys                                         # everything, hours: stop and go on
    python -m benchmarks.hostile_keys --undefended --entries newcomers --attacks trained_end --seeds 3    # they work
    python -m benchmarks.hostile_keys --presets echo-tiny --entries private --attacks long invented --seeds 3
    python -m benchmarks.hostile_keys --table                                 # what there is so far

Ten nodes, three of them hostile, on virtual time (`benchmarks/_hostile_world.py`): as newcomers, who attack from the
start, and as members, who are honest for a third of the steps and then turn. Under `tiny` every honest node trains and
generates; under `echo-tiny` one trains and the others generate for it, so that hostile groups come under its own
lineage. Accuracy is greedy on held-out problems at the end; the difference is to the run of the same seed in which the
same ten nodes are honest members.

`--entries private`: eight hostile keys come to four nodes, all of which are established as everybody is in a private
run, and deliver ten times as fast. `long` are right answers beside random letters, without log-probs; `invented` claims
log-probs. Their rival is the run of the same seed in which the four are alone.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final

from benchmarks._hostile_world import ALL, CASES, ENTRIES, HONEST, PRESETS, PRIVATE, Job, Outcome, Setting, run
from benchmarks._runs import Runs, run_parser
from benchmarks._statistics import estimate, plain, signed

LEAST: Final = -0.05  # of the lower end of the interval


def jobs(
    presets: Sequence[str], entries: Sequence[str], attacks: Sequence[str], num_seeds: int, is_defended: bool
) -> list[Job]:
    """Honest runs first: without them there is no difference."""
    made: list[Job] = []
    for preset in presets:
        for attack in (HONEST, *(attack for attack in attacks if attack != HONEST)):
            rivals = sorted({PRIVATE if entry == PRIVATE else "members" for entry in entries})
            for entry in entries if attack != HONEST else rivals:
                setting = Setting(is_defended=is_defended)
                if entry == PRIVATE:
                    setting = Setting(num_nodes=12, num_hostile=8, num_steps=100, is_defended=is_defended)
                made += [
                    Job(setting=setting, preset=preset, attack=attack, entry=entry, seed=seed)
                    for seed in range(num_seeds)
                ]
    return made


def describe(outcome: Outcome) -> str:
    """One finished run."""
    job = outcome.job
    return (
        f"{job.preset} {job.attack} as {job.entry}, seed {job.seed}: accuracy {outcome.start:.3f} -> "
        f"{outcome.accuracy:.3f}, {outcome.least_step} steps, hostile share {outcome.hostile_share:.3f}, "
        f"{outcome.num_honest_drawn} honest groups drawn in {outcome.virtual_s:.0f} virtual s, "
        f"held {outcome.num_held}, refused {sum(outcome.refusals.values())}, {outcome.seconds:.0f} s"
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """One row for each preset, entry and attack; `!` where the interval reaches below LEAST."""
    honest = {(o.job.setting, o.job.preset, o.job.seed): o for o in outcomes if o.job.attack == HONEST}
    lines = [
        "| preset | hostile keys are | attack | seeds | held-out accuracy | difference | share of draws "
        "| honest groups drawn | held |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for preset, entry, attack, is_defended in product(PRESETS, ENTRIES[::-1], CASES, (True, False)):
        cell = (preset, entry, attack, is_defended)
        of = [o for o in outcomes if (o.job.preset, o.job.entry, o.job.attack, o.job.setting.is_defended) == cell]
        if not of:
            continue
        pairs = [(o, honest[key]) for o in of if (key := (o.job.setting, preset, o.job.seed)) in honest]
        difference = estimate([o.accuracy - h.accuracy for o, h in pairs]) if pairs else None
        is_low = difference is not None and difference.mean - (difference.half_width or 0.0) < LEAST
        share = max(o.hostile_share for o in of)
        name = "-" if attack == HONEST and entry != PRIVATE else entry
        lines.append(
            f"| {preset} | {name} | {attack}{'' if is_defended else ', undefended'} "
            f"| {len(of)} | {plain(estimate([o.accuracy for o in of]))} "
            f"| {'-' if attack == HONEST else signed(difference)}{' !' if is_low else ''} "
            f"| {share:.3f} | {min(o.num_honest_drawn for o in of)} | {sum(o.num_held for o in of)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the missing runs and prints the table of all that are there."""
    parser = run_parser("hostile_keys", __doc__, seeds=6)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=ENTRIES[:2])
    parser.add_argument("--attacks", nargs="+", choices=CASES[1:], default=[ALL, *CASES[1:-1]])
    parser.add_argument("--undefended", action="store_true", help="defences taken out: the attacks have to work")
    options = parser.parse_args(arguments)
    runs = Runs(path=options.out, outcome=Outcome, run=run, describe=describe, num_workers=options.workers)
    if not options.table:
        wanted = jobs(options.presets, options.entries, options.attacks, options.seeds, not options.undefended)
        runs.finished(wanted)
    print(table(runs.read()))


if __name__ == "__main__":
    main()
