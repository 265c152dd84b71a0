"""Weights and groups between a trainer in each kind of network and generators in all of them: every ordered pair.

    python -m tests.lab.weights                     # as root; half a minute for each kind of the trainer
    python -m tests.lab.weights --trainers nat      # a trainer in this kind only

A trainer without a generator of its own publishes its policy; a generator in each kind of network, its own kind too,
takes the weights and sends groups. Prints, for each kind of the generator, seconds from pasting the link to the first
weights and to the third group that the trainer admitted.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.lab.lab_swarm import KINDS, LabNode, LabSwarm
from tests.lab.laboratory import Laboratory, why_not


def exchange(trainer_kind: str) -> dict[str, tuple[float, float]]:
    """Seconds to the first weights and to the third admitted group, by kind of the generator."""
    with tempfile.TemporaryDirectory() as folder, Laboratory() as lab, LabSwarm(lab, Path(folder)) as swarm:
        trainer = swarm.join(trainer_kind, "trainer", "--set", "weights.publish=true", "--set", 'roles=["trainer"]')
        swarm.wait(lambda: trainer.status().get("node_id"), "the trainer runs")
        generators = [swarm.join(kind, f"generator-{kind}", "--generate") for kind in KINDS]
        found: dict[str, list[float]] = {node.kind: [] for node in generators}

        def note(node: LabNode, seconds: float) -> None:
            taken = found[node.kind]
            if not taken and (node.status().get("following") or {}).get("served_step") is not None:
                taken.append(seconds)
            if len(taken) == 1 and trainer.admitted_from()[node.status().get("node_id", "")] >= 3:
                taken.append(seconds)

        def all_exchanged(began_s: float) -> bool:
            for node in generators:
                note(node, time.monotonic() - began_s)
            return all(len(taken) == 2 for taken in found.values())

        began_s = time.monotonic()
        try:
            swarm.wait(lambda: all_exchanged(began_s), f"weights and groups between {trainer_kind} and all")
        except AssertionError:
            print(json.dumps({"found": found, "followers": trainer.status()["followers"]}))
            print(json.dumps({node.kind: node.status().get("following") for node in generators}))
            raise
        return {kind: (round(weights, 1), round(groups, 1)) for kind, (weights, groups) in found.items()}


def main() -> None:
    """Prints one line of JSON for each kind of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=KINDS, choices=KINDS, help="kinds of the trainer's network")
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    for kind in arguments.trainers:
        print(json.dumps({"trainer": kind, "generators": exchange(kind)}), flush=True)


if __name__ == "__main__":
    main()
