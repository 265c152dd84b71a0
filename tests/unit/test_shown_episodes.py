"""Episodes that a node keeps of its evaluations: the first ones and the newest ones, whatever the disk does."""

from pathlib import Path

from swarm.episode import EpisodeOutcome, Message, Transition, TurnStatus
from swarm.telemetry.shown_episodes import ShownEpisode, read_episodes, write_episodes


def shown(step: int, action: str = "?abc") -> ShownEpisode:
    heard = (Message(role="user", content=">def="),)
    return ShownEpisode(
        step=step,
        env="look_up",
        task_id=7,
        opening=(Message(role="user", content="get:abc="),),
        actions=(action, "x"),
        outcome=EpisodeOutcome(
            reward=0.0,
            transitions=(
                Transition(messages=heard, reward=0.5, state_key="abc"),
                Transition(is_end=True, rewards={"outcome": 0.0}, status=TurnStatus.MALFORMED),
            ),
        ),
        reference="ghi",
        num_tries=4,
        num_right=step % 4,
    )


def test_the_first_evaluation_stays_and_the_newest_replaces_those_between(tmp_path: Path):
    for step in (0, 10, 20):
        write_episodes(tmp_path, [shown(step)])
    assert read_episodes(tmp_path) == (shown(0), shown(20))


def test_an_evaluation_made_again_counts_once(tmp_path: Path):
    write_episodes(tmp_path, [shown(0)])
    write_episodes(tmp_path, [shown(0)])
    assert read_episodes(tmp_path) == (shown(0),)


def test_what_the_disk_damaged_is_left_out(tmp_path: Path):
    assert read_episodes(tmp_path / "none") == ()
    write_episodes(tmp_path, [shown(0)])
    write_episodes(tmp_path, [shown(5)])
    (tmp_path / "episodes" / "first.json").write_text('[{"step": 0}]')
    assert read_episodes(tmp_path) == (shown(5),)
    (tmp_path / "episodes" / "newest.json").write_text("[")
    assert read_episodes(tmp_path) == ()


def test_a_disk_that_refuses_them_stops_nobody(tmp_path: Path):
    (tmp_path / "episodes").write_text("a file where the folder should be")
    write_episodes(tmp_path, [shown(0)])
    assert read_episodes(tmp_path) == ()
