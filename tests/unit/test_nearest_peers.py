"""The search for the nearest peers: it ends, whatever peers name, and finds those that are there."""

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from swarm.peers.nearest_peers import nearest_peers
from swarm.simulate.virtual.loop import run_virtual

Named = list[tuple[int, str]]
TIMEOUT_S = 4.0


def search(answers: dict[str, Named | None], known: Named, asked: list[str] | None = None, width: int = 4) -> list[str]:
    """A search among peers that answer as told; those that are not told of are silent."""

    async def ask(peer: str) -> Iterable[tuple[int, str]] | None:
        if asked is not None:
            asked.append(peer)
        if peer not in answers:
            await asyncio.sleep(3.0)
            return None
        return answers[peer]

    return run_virtual(nearest_peers(known, ask, width=width, at_once=3, timeout_s=TIMEOUT_S))


def test_it_goes_from_peer_to_peer_to_the_nearest() -> None:
    names = [(2**n, f"p{n}") for n in range(12)]
    answers: dict[str, Named | None] = {f"p{n}": names[max(0, n - 2) : n + 1] for n in range(12)}
    asked: list[str] = []
    assert search(answers, [names[-1]], asked)[:4] == ["p0", "p1", "p2", "p3"]
    assert len(asked) == len(set(asked))


def test_with_nobody_known_nobody_is_found() -> None:
    assert search({}, []) == []


def test_peers_that_are_not_there_are_left_out_and_take_no_place_of_others() -> None:
    ghosts = [(n, f"ghost{n}") for n in range(4)]
    answers: dict[str, Named | None] = {"a": [*ghosts, (90, "b")], "b": [(80, "c")], "c": []}
    assert search(answers, [(100, "a"), (90, "b")]) == ["c", "b", "a"]


def test_a_peer_is_no_farther_than_anybody_names_it() -> None:
    liar: Named = [(10**9, "near"), (10**9, "nearer")]
    answers: dict[str, Named | None] = {"liar": liar, "a": [(5, "near"), (4, "nearer")], "near": [], "nearer": []}
    assert search(answers, [(1, "liar"), (50, "a")], width=4) == ["liar", "nearer", "near", "a"]


@pytest.mark.parametrize("named", ["itself", "ever nearer ones"])
def test_it_ends_with_those_that_answered_whatever_a_peer_names(named: str) -> None:
    distances = itertools.count(10**6, -1)
    num_asked = 0

    async def ask(peer: str) -> Named | None:
        nonlocal num_asked
        num_asked += 1
        if peer == "honest":
            return []
        await asyncio.sleep(0.01)
        return [(distance := next(distances), "liar" if named == "itself" else f"liar{distance}") for _ in range(20)]

    async def scene() -> float:
        began_s = asyncio.get_running_loop().time()
        found = await nearest_peers([(10**7, "liar"), (10**8, "honest")], ask, width=4, at_once=3, timeout_s=TIMEOUT_S)
        assert found[-1] == "honest" and "liar" in found
        assert len(asyncio.all_tasks()) == 1, "nothing goes on"
        return asyncio.get_running_loop().time() - began_s

    took_s = run_virtual(scene())
    assert (took_s, num_asked) == (pytest.approx(0.01), 2) if named == "itself" else took_s == pytest.approx(TIMEOUT_S)


def test_a_search_that_is_given_up_leaves_nothing() -> None:
    async def never(peer: str) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        searching = asyncio.ensure_future(nearest_peers([(1, "a")], never, width=4, at_once=3, timeout_s=TIMEOUT_S))
        await asyncio.sleep(1.0)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scene())
