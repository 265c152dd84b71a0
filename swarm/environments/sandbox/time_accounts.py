"""CPU seconds that groups of other nodes take before they are admitted, by party and minute.

Invariant: an account that has used its seconds of a minute gets no more, however many keys share it. One part in SHARE
of these seconds is kept for first tries of keys that have used less than KEY_TRIES_S, so that a key is still tried if
another key of its subnet or neighbour has used up the rest.
"""

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from swarm.flow import DecayingSums
from swarm.interfaces import Producer
from swarm.trust_policy import KEY_TRIES_S, SHARE

HALF_LIFE_S: Final = 30.0  # of the time that counts as used
MAX_ACCOUNTS: Final = 4096
ESTABLISHED: Final = "established: "
_PER_MINUTE: Final = HALF_LIFE_S / math.log(2) / 60  # decaying sum over the seconds of a minute, at steady use


class Allowance(IntEnum):
    """CPU time that a producer's group may take for now."""

    NOTHING = 0
    FIRST_TRY = 1  # FIRST_TRY_S of CPU for its texts and for its replay, and no more
    ALL = 2


class TimeAccounts:
    """CPU seconds that every account has used lately. Single event loop, no threads.

    Example:
        accounts = TimeAccounts(loop.time, most_s_per_minute=15.0)
        allowance = accounts.allowance(producer)
        if allowance is not Allowance.NOTHING:
            accounts.spend(producer, work(), allowance)
    """

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0, most_s_per_minute: float = math.inf) -> None:
        """`most_s_per_minute`: CPU seconds that the groups of one account may take, also all at once."""
        self._now_s = now_s
        self._most_s = most_s_per_minute * _PER_MINUTE
        self._spent_s = DecayingSums[str](HALF_LIFE_S, MAX_ACCOUNTS)
        self._first_tries_s = DecayingSums[str](HALF_LIFE_S, MAX_ACCOUNTS)  # by account, too
        self._of_key_s = DecayingSums[str](HALF_LIFE_S, MAX_ACCOUNTS)  # own table: free keys evict only each other

    def allowance(self, producer: Producer) -> Allowance:
        """Allowance of a producer's next group."""
        if math.isinf(self._most_s):
            return Allowance.ALL
        account, now_s = account_of(producer), self._now_s()
        if self._spent_s.of(account, now_s) < self._most_s * (SHARE - 1) / SHARE:
            return Allowance.ALL
        has_tries = self._first_tries_s.of(account, now_s) < self._most_s / SHARE
        is_first = self._of_key_s.of(producer.node_id, now_s) < KEY_TRIES_S
        return Allowance.FIRST_TRY if has_tries and is_first else Allowance.NOTHING

    def spend(self, producer: Producer, seconds: float, allowance: Allowance) -> None:
        """Charges a producer's account and key with the CPU seconds of a group that was allowed `allowance`."""
        if math.isinf(self._most_s):
            return
        now_s = self._now_s()
        spent_s = self._first_tries_s if allowance is Allowance.FIRST_TRY else self._spent_s
        spent_s.add(account_of(producer), seconds, now_s)
        self._of_key_s.add(producer.node_id, seconds, now_s)


def account_of(producer: Producer) -> str:
    """Account of a producer's time: its origin, kept separate for known producers; its key if known but relayed."""
    if producer.is_known:
        origin = producer.node_id if producer.is_relayed else producer.origin or producer.node_id
        return f"{ESTABLISHED if producer.is_established else 'known from '}{origin}"
    return producer.origin or producer.node_id
