"""Table of the keys of node.toml about other nodes: exchange, directory, coordinator, entry and weights.

Invariant: data alone, as in `settings_table`, which includes these rows.
"""

from typing import Final

from swarm.causes.setting_effects import LONELY, OF_WEIGHTS, UNUSED, high, hint, low, odd, of

OF_OTHERS: Final = (
    low("exchange.max_neighbours", 1, 8, "no node is connected", LONELY, of("no_peer_yet")),
    low(
        "exchange.max_group_bytes",
        100_000,
        4 * 2**20,
        "groups are too large to be sent or taken",
        UNUSED,
        of("cannot_be_scored", "settings_differ"),
    ),
    low("exchange.store_bytes", 50 * 2**20, 2 * 2**30, "the store is soon full", of("disk_full")),
    low(
        "exchange.groups_per_minute",
        60,
        6000,
        "few groups of a peer are taken",
        UNUSED,
        of("come_too_late", "quota_too_low"),
    ),
    odd(
        "exchange.max_upload_bytes_per_s",
        lambda v, _: 0 < v < 500_000,
        0,
        "others get groups and weights slowly",
        LONELY,
        of("not_published", "far_behind"),
    ),
    low("exchange.dial_timeout_s", 0.5, 5.0, "connections are given up before they stand", LONELY),
    high("exchange.lookup_every_s", 60, 2.0, "the directory is hardly ever looked at", LONELY),
    high("exchange.advert_every_s", 600, 30.0, "others learn of this node late", LONELY),
    hint("exchange.reach", lambda v, _: v == "outward", "auto", "others reach it through relays alone", LONELY),
    hint("exchange.reach", lambda v, _: v == "dialable", "auto", "no relay leads to this node", LONELY),
    hint("exchange.anchors", lambda v, _: bool(v), [], "these are dialled, whoever answers there", LONELY),
    hint(  # with port 0 the start looked it up
        "exchange.advertise",
        lambda v, _: bool(v) and not str(v).endswith(":0"),
        None,
        "others dial this address",
        LONELY,
        of("no_relay"),
    ),
    odd(
        "directory.kind",
        lambda v, c: v == "none" and (c.replay.local_groups == 0 or len(c.roles) < 2),
        "dht",
        "the node runs alone, and needs others",
        LONELY,
        of("no_steps", "no_step_yet"),
    ),
    hint("directory.announce", lambda v, _: bool(v), [], "others look for the directory there", LONELY),
    high("directory.rejoin_every_s", 300, 20.0, "a directory that was lost is not found for so long", LONELY),
    high("directory.shards", 1, 1, "adverts are looked for under other keys than those of a run with 1", LONELY),
    hint("follow.policy", lambda v, _: bool(v), None, "this trainer alone is followed", LONELY),
    high("coordinator.heartbeat_s", 60, 5.0, "the coordinator counts the node as gone", of("coordinator_away"), LONELY),
    hint("entry.work_bits", lambda v, _: v < 17, 17, "others may ask for more work than that", LONELY),
    high("entry.work_bits", 22, 17, "proof of work takes hours", LONELY, of("never_ran", "no_external")),
    hint(
        "entry.kind",
        lambda v, _: v in ("members", "invited", "work"),
        None,
        "only some are let into the run, by this node and by others",
        LONELY,
        of("no_entry"),
    ),
    hint("entry.denied", lambda v, _: bool(v), [], "these are refused, and whom they invited", LONELY, of("no_entry")),
    odd("entry.established", lambda v, _: v == "members", "everybody", "all others are newcomers", of("newcomers")),
    # --- weights
    low("weights.store_bytes", 200 * 2**20, 8 * 2**30, "a version of the weights finds no room", OF_WEIGHTS),
    high("weights.anchor_every", 200, 10, "who begins to follow has a long chain to fetch", OF_WEIGHTS),
)
