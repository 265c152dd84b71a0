"""Changes under a running swarm: a relay dies, a laptop and a router get other addresses."""

from pathlib import Path

import pytest

from tests.lab.lab_swarm import LabNode, LabSwarm
from tests.lab.laboratory import Laboratory, why_not

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=f"no laboratory of networks: {why_not()}"),
]


def relays_of(node: LabNode) -> set[str]:
    return {relay["node_id"] for relay in node.status().get("reach", {}).get("relays", ())}


def test_when_a_relay_dies_or_an_address_changes_both_sides_go_on_where_they_were(tmp_path: Path) -> None:
    with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
        relay, ada, bell = swarm.join("open", "relay"), swarm.join("nat", "ada"), swarm.join("nat", "bell")

        def flows(at: LabNode, source: LabNode, more: int = 3) -> float:
            made_by = source.status()["node_id"]
            least = at.admitted_from()[made_by] + more
            return swarm.wait(lambda: at.admitted_from()[made_by] >= least, f"{source.kind} -> {at.kind}")

        swarm.wait(
            lambda: all(len(relays_of(node)) == 2 for node in (ada, bell)), "both hold reservations at two relays"
        )
        flows(ada, bell)
        flows(bell, ada)

        relay.process.kill()
        relay_id = relay.status()["node_id"]
        swarm.wait(lambda: relay_id not in relays_of(ada) | relays_of(bell), "the dead relay is given up")
        print(f"after the death of a relay: {flows(ada, bell):.1f} and {flows(bell, ada):.1f} s")

        home = lab.command(ada.namespace, ["ip"])
        lab.run([*home, "addr", "del", "192.168.2.2/24", "dev", "up0"])
        lab.run([*home, "addr", "add", "192.168.2.77/24", "dev", "up0"])
        lab.run([*home, "route", "replace", "default", "via", "192.168.2.1"])
        print(f"after another address: {flows(ada, bell):.1f} and {flows(bell, ada):.1f} s")
        for node in (ada, bell):
            assert not node.status()["refusals"], "nobody was blamed"
