"""A link pasted in each kind of network: real daemons, real routers of the kernel, a real DHT."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab_swarm import KINDS, LabSwarm
from tests.lab.laboratory import Laboratory, why_not
from tests.waits import HANG_S

SWARM = [str(Path(sys.executable).parent / "swarm")]
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=f"no laboratory of networks: {why_not()}"),
]


def test_in_all_kinds_of_networks_at_once_each_node_learns_from_every_other(tmp_path: Path) -> None:
    with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
        nodes = [swarm.join(kind) for kind in KINDS]

        def ids() -> set[str]:
            return {node.status().get("node_id", "") for node in nodes}

        swarm.wait(
            lambda: all(set(node.admitted_from()) >= ids() - {node.status().get("node_id")} for node in nodes),
            "every ordered pair exchanged a group",
        )
        reach = {node.kind: node.status()["reach"]["kind"] for node in nodes}
        assert reach == {kind: "dialable" if kind == "open" else "outward" for kind in KINDS}
        assert not any(node.status()["refusals"] for node in nodes)


def test_where_all_are_behind_routers_the_coordinator_leads_port_443_to_the_others(tmp_path: Path) -> None:
    with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
        home, office = swarm.join("nat", "home"), swarm.join("only443", "office")
        for node, other in ((home, office), (office, home)):
            swarm.wait(lambda a=node, b=other: a.admitted_from()[b.status().get("node_id", "-")], "a group came")


def test_a_trainer_and_a_generator_behind_two_routers_work_for_each_other(tmp_path: Path) -> None:
    with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
        trainer = swarm.join("nat", "trainer", "--set", "weights.publish=true")
        generator = swarm.join("double", "generator", "--generate")
        swarm.wait(lambda: (generator.status().get("following") or {}).get("served_step"), "weights arrive")
        made_by = generator.status()["node_id"]
        swarm.wait(lambda: trainer.admitted_from()[made_by] >= 3, "its groups reach the trainer")


def test_the_doctor_is_right_about_each_kind_of_network_before_anybody_joins(tmp_path: Path) -> None:
    with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
        asked = {
            kind: subprocess.Popen(
                lab.command(swarm.network(kind, kind), [*SWARM, "doctor", swarm.link, "--json"]), stdout=subprocess.PIPE
            )
            for kind in KINDS
        }
        for kind, process in asked.items():
            found = json.loads(process.communicate(timeout=HANG_S)[0])
            assert found["is_dialable"] == (kind == "open"), (kind, found)
            assert found["is_idle_kept"] == (kind != "short"), (kind, found)
            assert bool(found["unreached"]) == (kind == "only443"), (kind, found)
            assert (found["relay_ms"] is None) == (kind == "open"), (kind, found)
