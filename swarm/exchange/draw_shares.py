"""Shares of the draws: the places of a step that each party may take with groups that other nodes made.

A step has `external_groups` places for groups of other lineages, and followers share those of its `local_groups` places
that the node does not fill itself. Empty places count too, so that a share is a share of the whole step: otherwise
newcomers that are alone in the swarm would fill the step.

Invariant, in every run: of SHARE consecutive places all newcomers together have at most one. A group without log-probs
counts as a newcomer's, whoever made it.

In an open run also: of each WINDOW of places one established party, or the keys of one subnet, has at most a share of
max(1/8, 1/n), rounded up to a whole place, where n counts the established parties that took a place in the window or
have a group waiting. If tasks hardly repeat, one task has at most an eighth of the places of a draw (at least one
place), and each party, each subnet and all newcomers together have at most one or a few places of a window for one task
(`TaskQuota`). A private run bounds neither parties nor tasks: people let a few nodes memorise one task to test a setup.

Intended consequences:
- In an open run of newcomers alone each draws at most one group in eight places from the others.
- A trainer that does not generate, and whose followers are all newcomers or all leave out log-probs, waits: a step of
  their groups alone would exceed the newcomers' share. The trainer's log names the remedy.
- Slow established followers do not stop a trainer. A follower that delivers is held to its share as long as others may
  still bring theirs; once nobody gets credit any more (groups that found no place count), the step consists of the
  groups that the shares allow, and of one at least, which may exceed the share of a step of fewer than eight places.
- n counts the parties that take part: with seven of eight members away, the eighth fills its neighbour's step after at
  most a window of places.

The window is journalled with the draws (`Draw.places`), so it survives a restart.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

from swarm.peers.parties import Parties
from swarm.peers.quotas import TaskQuota
from swarm.trust_policy import LEAST_BOUND, SHARE, WINDOW
from swarm.types import DrawPlace, NodeId, TaskName

_NEWCOMERS: Final = ""  # the party of all newcomers


class DrawShares:
    """The window of the newest places, and the bounds that follow from it for the next draw.

    Example:
        shares = DrawShares(parties)
        places = shares.begin(producers_held, num_places=8)
        if places.may_take(producer, task, is_newcomer=False):
            places.take(producer, task, is_newcomer=False)
        shares.commit(places)
    """

    def __init__(self, parties: Parties, max_reuse: int = 1) -> None:
        """Begins with an empty window. `max_reuse`: number of places that one group may take."""
        self.parties = parties
        self.tasks = TaskQuota(max_reuse)  # of the window, and of what waits
        self._window = deque[DrawPlace]()  # oldest first
        self._parties_of = deque[str]()  # of the window's places, when they were taken
        self._num_waiting = Counter[str]()  # groups by party, above 0; newcomers move no share
        # Places after the window, before any is taken; None since the window or the waiting parties changed.
        self._next: DrawPlaces | None = None

    @property
    def are_bounded(self) -> bool:
        """True if established parties and tasks have bounds; False in a private run."""
        return not self.parties.is_private

    def begin(self, waiting: Iterable[NodeId], num_places: int) -> "DrawPlaces":
        """Returns the places of the next draw, of which none is taken yet.

        Args:
            waiting: producers of the groups that could be drawn.
            num_places: most places of the draw; bounds those of one task.
        """
        return DrawPlaces(self.parties, self.tasks, self._window, waiting, num_places)

    def num_left_of_task(
        self, producer: NodeId, task: TaskName, is_newcomer: bool, waiting: Callable[[], Iterable[NodeId]]
    ) -> int:
        """Number of places that the next window has for one task by one producer; `waiting()` as in `begin`."""
        if self._next is None:
            self._next = self.begin(waiting(), 0)
        return self._next.num_left_of_task(producer, task, is_newcomer)

    def commit(self, places: "DrawPlaces") -> None:
        """Adds the taken and empty places of a draw to the window."""
        self._extend(places.taken)

    def restore(self, places: Sequence[DrawPlace]) -> None:
        """Restores the window after a restart from the newest journalled places, oldest first."""
        while self._window:
            self._forget_oldest()
        self._extend(places)

    def _extend(self, places: Iterable[DrawPlace]) -> None:
        for place in places:
            party = _NEWCOMERS if place.is_newcomer else self.parties.party_of(place.producer)
            self._window.append(place)
            self._parties_of.append(party)
            self.tasks.count(party, place.task, 1)
        while len(self._window) > WINDOW:
            self._forget_oldest()
        self._next = None

    def _forget_oldest(self) -> None:
        self.tasks.count(self._parties_of.popleft(), self._window.popleft().task, -1)

    def count_waiting(self, party: str, task: TaskName, by: int, *, is_newcomer: bool) -> None:
        """Counts a group that begins to wait for a draw (`by` is 1) or no longer waits (`by` is -1)."""
        self.tasks.count(_NEWCOMERS if is_newcomer else party, task, by)
        if is_newcomer:
            return
        self._num_waiting[party] += by
        if self._num_waiting[party] == max(0, by):
            self._next = None
        if not self._num_waiting[party]:
            del self._num_waiting[party]


class DrawPlaces:
    """The places of one draw in order, after those of the window; `DrawShares.commit` adds them to the window."""

    def __init__(
        self,
        parties: Parties,
        tasks: TaskQuota,
        window: Iterable[DrawPlace],
        waiting: Iterable[NodeId],
        num_places: int,
    ) -> None:
        self.taken: list[DrawPlace] = []
        self._parties = parties
        self._before = deque(window, maxlen=WINDOW - 1)  # with the next place it is a whole window
        self._since_newcomer = SHARE  # places since the newest one of a newcomer
        self._counts = Counter[str]()  # of established groups, by party and by subnet
        self._counts_now = Counter[str]()
        self._tasks_now = Counter[TaskName]()
        self._tasks = Counter[tuple[str, TaskName]]()  # in the window, by party or subnet
        self._quota = tasks
        self._most_of_one_task = tasks.most_of_draw(num_places)
        for place in self._before:
            self._count(place, 1)
            self._since_newcomer = 0 if place.is_newcomer else self._since_newcomer + 1
        active = {
            parties.party_of(place.producer) for place in self._before if place.producer and not place.is_newcomer
        }
        active.update(parties.party_of(producer) for producer in waiting if parties.is_established(producer))
        self.most_of_one = max(LEAST_BOUND, -(-WINDOW // max(1, len(active))))

    def fork(self) -> Self:
        """A copy on which further places can be tried."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.taken, other._before = list(self.taken), self._before.copy()
        other._counts, other._counts_now = self._counts.copy(), self._counts_now.copy()
        other._tasks_now, other._tasks = self._tasks_now.copy(), self._tasks.copy()
        return other

    def adopt(self, other: Self) -> None:
        """Replaces the places of this draw with the places of a fork."""
        self.__dict__.update(other.__dict__)

    @property
    def may_take_newcomer(self) -> bool:
        """True if the next place may be a newcomer's."""
        return self._since_newcomer >= SHARE - 1

    def may_take(self, producer: NodeId, task: TaskName, is_newcomer: bool) -> bool:
        """True if a group of this producer and task may take the next place."""
        return self.has_room_for_task(producer, task, is_newcomer) and self.has_room_for(producer, is_newcomer)

    def has_room_for_task(self, producer: NodeId, task: TaskName, is_newcomer: bool) -> bool:
        """True if the bounds of the task allow a group of this producer at the next place."""
        if self._parties.is_private:
            return True
        is_below_draws = self._tasks_now[task] < self._most_of_one_task
        return is_below_draws and self.num_left_of_task(producer, task, is_newcomer) > 0

    def has_room_for(self, producer: NodeId, is_newcomer: bool, *, of_places: int = 0) -> bool:
        """True if the bounds of the group's party allow a group of this producer at the next place.

        Args:
            producer: producer of the group.
            is_newcomer: True if the group counts as a newcomer's.
            of_places: number of places; if not 0, the party may take only its share of this many places in this draw,
                so that the first party does not fill a step.
        """
        if is_newcomer:
            return self.may_take_newcomer
        if self._parties.is_private:
            return True
        most_now = -(-of_places * self.most_of_one // WINDOW) if of_places else WINDOW
        return all(
            self._counts[bound] < self.most_of_one and self._counts_now[bound] < most_now
            for bound in self._parties.bounds_of(producer)
        )

    def num_left_of_task(self, producer: NodeId, task: TaskName, is_newcomer: bool) -> int:
        """Number of places of the window left for groups of one task by one producer, >= 0."""
        most = self._quota.most_of_party(LEAST_BOUND if is_newcomer else self.most_of_one)
        taken = [self._tasks[bound, task] for bound in self._bounds_of(producer, is_newcomer)]
        return max(0, most - max(taken, default=0))

    def take(self, producer: NodeId, task: TaskName, is_newcomer: bool) -> None:
        """Gives the next place to a group of this producer and task."""
        self._add(DrawPlace(producer, is_newcomer, task))
        self._tasks_now[task] += 1
        if not is_newcomer:
            self._counts_now.update(self._parties.bounds_of(producer))

    def leave_free(self, count: int) -> None:
        """Leaves the next `count` places empty."""
        for _ in range(count):
            self._add(DrawPlace())

    def _add(self, place: DrawPlace) -> None:
        if len(self._before) == self._before.maxlen:
            self._count(self._before[0], -1)
        self._before.append(place)
        self._count(place, 1)
        self._since_newcomer = 0 if place.is_newcomer else self._since_newcomer + 1
        self.taken.append(place)

    def _count(self, place: DrawPlace, by: int) -> None:
        if not place.producer:
            return
        for bound in self._bounds_of(place.producer, place.is_newcomer):
            self._tasks[bound, place.task] += by
            if not place.is_newcomer:
                self._counts[bound] += by

    def _bounds_of(self, producer: NodeId, is_newcomer: bool) -> tuple[str, ...]:
        return (_NEWCOMERS,) if is_newcomer else self._parties.bounds_of(producer)
