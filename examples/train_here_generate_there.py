"""Train here, generate there: one node trains, others generate for it with its newest weights.

    python examples/train_here_generate_there.py [STEPS] [DIRECTORY]      # tiny model: 12 steps in about 20 seconds

The trainer publishes every version as a signed, lossless patch; two generators follow it in processes of their own.
On other machines the same is `swarm join LINK --generate` (README); here all are on this one, without a coordinator.
"""

import sys
from collections import Counter
from pathlib import Path

import swarm
from swarm.events import GroupAdmitted, events_of
from swarm.telemetry import read_events


def main(steps: int = 12, directory: str = "train-here") -> None:
    run = swarm.train(
        "tiny",
        environments=("char:sort",),
        directory=directory,
        steps=steps,
        generators=2,
        overrides=('roles=["trainer"]', "replay.max_age_steps=4"),  # it generates nothing itself
    )
    print("held out:", run.held_out("sort"))
    came = Counter(
        each.producer[:8] for each in events_of(GroupAdmitted, read_events(Path(directory) / "events.jsonl"))
    )
    print("groups by generator:", dict(came))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12, *sys.argv[2:])
