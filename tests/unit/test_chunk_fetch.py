"""Choice of the source of a chunk, and the effect of outcomes on it."""

from swarm.clock import ManualClock
from swarm.weight_sync.chunk_fetch import (
    BANNED_S,
    HEDGE_S,
    MAX_FAILURES,
    MAX_PER_SOURCE,
    RESTING_S,
    TIMEOUT_S,
    ChunkRequest,
    ChunkSources,
    Outcome,
)
from swarm.weights.payload import CHUNK_BYTES


def serve(sources: ChunkSources, peer: str, seconds: float, num_bytes: int = CHUNK_BYTES) -> None:
    sources.end(sources.begin(peer, b"served"), Outcome.SERVED, num_bytes=num_bytes, seconds=seconds)


def choose(sources: ChunkSources, chunk: bytes) -> str | None:
    return next((peer for peer in sources.free if sources.can_have(peer, chunk)), None)


def test_a_source_is_asked_before_the_origin_unless_it_is_much_slower() -> None:
    sources, chunk = ChunkSources(ManualClock()), b"c" * 32
    sources.connect("origin", is_origin=True)
    sources.connect("source", is_origin=False)
    assert choose(sources, chunk) == "origin", "nobody else announced it"
    sources.add_held("source", [chunk])
    assert choose(sources, chunk) == "source"
    for peer, seconds in (("origin", 1.0), ("source", 1.5)):
        serve(sources, peer, seconds, 1000)
    assert choose(sources, chunk) == "source"
    for _ in range(8):
        serve(sources, "source", 10.0, 1000)
    assert choose(sources, chunk) == "origin"


def test_nobody_is_asked_for_more_than_a_few_chunks_at_a_time() -> None:
    sources = ChunkSources(ManualClock())
    sources.connect("origin", is_origin=True)
    requests: list[ChunkRequest] = []
    for number in range(MAX_PER_SOURCE):
        assert choose(sources, bytes([number])) == "origin"
        requests.append(sources.begin("origin", bytes([number])))
    assert choose(sources, b"x") is None and sources.is_obtainable(b"x")
    sources.end(requests[0], Outcome.CANCELLED)
    assert choose(sources, b"x") == "origin"


def test_failures_count_over_connections_and_a_forger_is_banned_for_long() -> None:
    clock = ManualClock()
    sources, chunk = ChunkSources(clock), b"c" * 32
    for peer in ("good", "bad"):
        sources.connect(peer, is_origin=False)
        sources.add_held(peer, [chunk])
    sources.end(sources.begin("bad", chunk), Outcome.FAILED)
    sources.disconnect("bad")
    sources.connect("bad", is_origin=False)
    sources.add_held("bad", [chunk])
    assert choose(sources, chunk) == "good"
    sources.record_forgery("bad")
    assert sources.is_banned("bad") and not sources.is_banned("good")
    clock.advance(BANNED_S + 1)
    assert not sources.is_banned("bad")


def test_an_unknown_source_is_asked_for_one_chunk_and_after_an_origin_that_delivers() -> None:
    sources, chunk = ChunkSources(ManualClock()), b"c" * 32
    sources.connect("origin", is_origin=True)
    sources.connect("new", is_origin=False)
    sources.add_held("new", [chunk])
    serve(sources, "origin", 0.1)
    assert choose(sources, chunk) == "origin"
    of_origin = sources.begin("origin", chunk)
    assert choose(sources, chunk) == "new", "the origin has something to send already"
    of_new = sources.begin("new", chunk)
    assert choose(sources, chunk) == "origin", "one at a time while nothing is known of it"
    sources.end(of_new, Outcome.SERVED, num_bytes=CHUNK_BYTES, seconds=0.05)
    sources.end(of_origin, Outcome.CANCELLED)
    assert choose(sources, chunk) == "new", "it delivers: the origin has everybody to serve"


def test_a_source_that_keeps_failing_rests_and_what_fails_together_counts_once() -> None:
    clock = ManualClock()
    sources = ChunkSources(clock)
    sources.connect("source", is_origin=False)
    serve(sources, "source", 1.0)
    assert sources.has_served("source")
    for request in [sources.begin("source", b"c") for _ in range(MAX_FAILURES)]:
        clock.advance(1.0)
        sources.end(request, Outcome.FAILED)
    assert not sources.is_banned("source") and not sources.has_served("source")
    for _ in range(MAX_FAILURES - 1):
        request = sources.begin("source", b"c")
        clock.advance(1.0)
        sources.end(request, Outcome.FAILED)
    assert sources.is_banned("source")
    clock.advance(RESTING_S + 1)
    assert not sources.is_banned("source")
    for _ in range(MAX_FAILURES):
        sources.record_unreachable("away")
    assert sources.is_banned("away")


def test_a_slow_link_gets_more_time_until_its_chunks_are_timely_and_the_origin_helps_no_sooner_than_it_can() -> None:
    clock = ManualClock()
    sources = ChunkSources(clock)
    sources.connect("origin", is_origin=True)
    assert sources.timeout_s("origin") == TIMEOUT_S and sources.hedge_after_s("origin") == HEDGE_S
    for _ in range(2):
        request = sources.begin("origin", b"c")
        clock.advance(sources.timeout_s("origin"))
        sources.end(request, Outcome.FAILED)
    assert sources.timeout_s("origin") == 4 * TIMEOUT_S
    serve(sources, "origin", 2 * TIMEOUT_S)
    assert sources.timeout_s("origin") == 4 * TIMEOUT_S
    serve(sources, "origin", 1.0)
    assert sources.timeout_s("origin") == 2 * TIMEOUT_S
    slow = ChunkSources(clock)
    slow.connect("origin", is_origin=True)
    serve(slow, "origin", 4.0)
    assert slow.hedge_after_s("origin") == 12.0


def test_a_chunk_that_everybody_lacks_cannot_be_had() -> None:
    sources, chunk = ChunkSources(ManualClock()), b"c" * 32
    sources.connect("origin", is_origin=True)
    sources.end(sources.begin("origin", chunk), Outcome.LACKED)
    assert not sources.is_obtainable(chunk) and choose(sources, chunk) is None
    sources.add_held("origin", [chunk])
    assert sources.is_obtainable(chunk)
