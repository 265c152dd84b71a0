"""Parties: keys that count as one, and keys that are established.

A key costs nothing, so influence is bounded per party and not per key. Invariant: nothing that a free key does by
itself, for however long, makes it established, and keys without a voucher are at most one party of newcomers.

Established keys. In a private run all keys: the owner let in each node that reaches this one, and each key is its own
party. Else the members of the run, and the nodes that members invited. Right answers prove nothing: a script writes
them as well as a policy does; nor does a proof of work, which costs minutes and no more.

Parties. An invited key is one party with the member that answers for it: a member that invites its own keys gains
nothing. Invited keys that proved themselves at public addresses of one subnet share a bound as well. Each party also
has its own bounds, so nobody can use up another party's share by moving into its subnet. Members share nothing by
address: the operator named each of them, and machines of one lab are in one subnet. Only an address where this node
reached the key counts; an advert could claim the subnet of a victim. Names are not resolved, and nobody shares one.
Keys behind a relay share no bound with others there, but newcomers share the work that they cause.

Keys that behave alike are not merged: with a small model honest nodes give equal answers to equal tasks, so equal
answers do not show one owner. Copies are refused by their digests instead.
"""

from collections.abc import Callable

from swarm.addresses import public_subnet_of, split_relayed
from swarm.peers.entry import EntryRule
from swarm.types import NodeId, short


class Parties:
    """Standing of keys, and the party of each key.

    Args:
        entry: rule that knows the members and the nodes that they invited; None in a private run.
        endpoint_of: returns the endpoint at which a key proved itself to this node; None if it did not.

    Example:
        parties = Parties(EntryRule(config.entry, config.run_id, clock))
        if parties.is_established(producer): ...
    """

    def __init__(
        self, entry: EntryRule | None = None, endpoint_of: Callable[[NodeId], str | None] = lambda _: None
    ) -> None:
        self.entry = entry
        self._endpoint_of = endpoint_of

    @property
    def is_private(self) -> bool:
        """True if every key is established and is its own party."""
        return self.entry is None

    def is_established(self, node_id: NodeId) -> bool:
        """True if the groups of a key count in full."""
        entry = self.entry
        return entry is None or entry.is_member(node_id) or entry.voucher_of(node_id) is not None

    def standing_of(self, node_id: NodeId) -> str:
        """Standing of a key, for people: "member", "newcomer" or "invited by ..."; "" in a private run."""
        entry = self.entry
        if entry is None:
            return ""
        voucher = entry.voucher_of(node_id)
        if voucher is not None:
            return f"invited by {short(voucher)}"
        return "member" if entry.is_member(node_id) else "newcomer"

    def party_of(self, node_id: NodeId) -> str:
        """Party of a key: the key itself, its voucher, or the public subnet of a newcomer, which counts among
        newcomers.
        """
        entry = self.entry
        if entry is None or entry.is_member(node_id):
            return node_id
        return entry.voucher_of(node_id) or self._subnet_of(node_id) or node_id

    def bounds_of(self, node_id: NodeId) -> tuple[str, ...]:
        """Names under which an established key's groups count: its party, and for an invited key its subnet."""
        entry = self.entry
        if entry is None or entry.is_member(node_id):
            return (node_id,)
        party, subnet = self.party_of(node_id), self._subnet_of(node_id)
        if self._is_relayed(node_id):
            return (party,)  # the relay's subnet says nothing of who is behind it
        return (party,) if subnet is None or subnet == party else (party, subnet)

    def origin_of(self, node_id: NodeId) -> str:
        """Name that the work caused by a key counts against; "" if the key proved itself nowhere.

        Outside private runs an established key counts as its party; any other as its public subnet or itself.
        """
        if not self.is_private and self.is_established(node_id):
            return self.party_of(node_id)
        if self._endpoint_of(node_id) is None:
            return ""
        return self._subnet_of(node_id) or node_id

    def _is_relayed(self, node_id: NodeId) -> bool:
        endpoint = self._endpoint_of(node_id)
        return endpoint is not None and bool(split_relayed(endpoint)[1])

    def _subnet_of(self, node_id: NodeId) -> str | None:
        """Subnet of a key's public address, or of its relay's; None for any other address, and for a name."""
        endpoint = self._endpoint_of(node_id)
        return None if endpoint is None else public_subnet_of(split_relayed(endpoint)[0].rpartition(":")[0])
