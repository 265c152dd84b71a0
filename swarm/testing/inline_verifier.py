"""Verifier inside the calling process, for simulations and benchmarks in which every answer is our own.

Invariant: only for trusted text. An external answer must go through `swarm.environments.sandbox.verifier`; the one
exception is an environment of kind char, whose verifier compares two strings and can run nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from swarm.interfaces import Environment, Verdict


class InlineVerifier:
    """An `interfaces.Verifier` without isolation: unsafe for external text, except in char environments."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        """`environments` by name, as `build_environments` returns them."""
        self._environments = dict(environments)

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        environment = self._environments.get(env)
        if environment is None:
            raise LookupError(f"environment {env!r} is not part of this run")
        return Verdict(
            task=environment.task(task_id),
            rewards=np.array([environment.reward(task_id, answer) for answer in answers], dtype=np.float32),
            verifier=environment.verifier,
            reference=environment.reference(task_id),
        )

    async def close(self) -> None:
        """Nothing to end; here so that both verifiers can be closed alike."""
