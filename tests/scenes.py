"""Tests that are one coroutine in virtual time: the decorated scene is the test."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any

from swarm.simulate.virtual.loop import run_virtual

Scene = Callable[..., Any]


def make_test(scene: Scene, play: Callable[..., None], takes: Sequence[str] = (), num_given: int = 0) -> Scene:
    """A test that plays a scene.

    Args:
        scene: a coroutine function; its parameters after the given ones are fixtures, or parameters of the test.
        play: called with the scene, and by name with the fixtures that it takes.
        takes: names of these fixtures.
        num_given: first parameters of the scene, which `play` gives.
    """
    wanted = list(signature(scene).parameters.values())[num_given:]
    names = [parameter.name for parameter in wanted]

    def test(**fixtures: Any) -> None:
        play(partial(scene, **{name: fixtures[name] for name in names}), **{name: fixtures[name] for name in takes})

    others = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in takes if name not in names]
    test.__dict__.update(scene.__dict__, __signature__=Signature([*others, *wanted]))
    test.__name__, test.__qualname__, test.__doc__ = scene.__name__, scene.__qualname__, scene.__doc__
    return test


def in_virtual_time(scene: Scene) -> Scene:
    """Makes a test of a coroutine that needs no world."""
    return make_test(scene, lambda played: run_virtual(played()))
