"""Configuration of an environment of the run ([[environments]] of node.toml).

Invariant: an environment with believed observations (exchange "scored") lists the nodes to believe.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarm.config.network_config import MAX_MEMBERS, NodeIdText
from swarm.config.section import Model, NotNegative, Positive


class EnvironmentConfig(Model):
    """One environment: its problems, their prompt, and the verifier of answers."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,40}$")
    """Name used by every node of the run."""
    kind: Literal[
        "reasoning_gym",
        "jsonl",
        "char",
        "function",
        "plugin",
        "calculator",
        "retry",
        "look_up",
        "grid_world",
        "apps",
        "dialogue",
        "code",
        "nim",
        "notes",
        "python",
    ]
    """Kind of loader, see docs/environments.md. `function` and `plugin` name local code and are refused in a
    join manifest."""
    dataset: str = ""
    """reasoning_gym: dataset name. jsonl, python: path. char: task name. function: `module:function`, plugin:
    `module:Class` (in place of a module a path ending in .py), or the name of an entry point of the group
    `swarm.environments`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the kind or dataset; retry: `inner` is a section like this one, without a name."""
    seed: NotNegative = 0
    """Seed from which every node rebuilds the same problems."""
    num_tasks: Positive = 1_000_000
    """Task ids run from 0 to this minus 1."""
    prompt: str = "{question}"
    """Template of the user message."""
    prefill: str = ""
    """Beginning of the assistant's turn that generation continues."""
    system: str = ""
    """System message before the question; of the built-in kinds of single answers and of episodes alike."""
    digest: str = ""
    """jsonl: SHA-256 of the file. plugin: digest of the installed package that has the entry point, as `swarm check`
    shows it. Required in a join manifest."""
    exchange: Literal["replayable", "scored", "own"] = "replayable"
    """Episodes that count. `replayable`: of every node, each is replayed here. `scored`: of `scored_from`, whose
    observations are believed and whose last action is scored again. `own`: of this node, and they never leave it."""
    scored_from: tuple[NodeIdText, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """scored: node ids whose observations are believed, one at least."""
    allow_code: bool = False
    """python: carry out programs of the nodes in `scored_from`, in the confined process; off, nobody's but the own
    model's."""
    reward_range: tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]] = (
        0.0,
        1.0,
    )
    """function: what it returns lies between these; rewards are rescaled from there to [0, 1], and one outside is an
    error. The upper end counts as success."""
    reward_weights: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """Value of an episode: the sum of its named rewards times these, clipped to [0, 1]; of a `function` in
    `reward_range`, and outside of that an error. Empty: `outcome` alone."""

    @model_validator(mode="after")
    def _can_work(self) -> "EnvironmentConfig":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range: {low:g} is not below {high:g}")
        if (low, high) != (0.0, 1.0) and self.kind != "function":
            raise ValueError(f"reward_range: kind {self.kind} has rewards in [0, 1]; leave it out")
        if self.kind == "python" and self.exchange == "replayable":
            raise ValueError(
                "kind python: nobody can replay what a program does within limits in seconds; set exchange = "
                '"own", or "scored" with scored_from and allow_code = true (kind code counts steps, and is replayable)'
            )
        if self.kind == "python" and self.exchange == "scored" and not self.allow_code:
            raise ValueError(
                'kind python: exchange "scored" carries out programs that other nodes send; set allow_code = true to '
                'want that, or exchange = "own"'
            )
        if self.allow_code and self.kind != "python":
            raise ValueError(f"allow_code: kind {self.kind} carries out no program of another node; leave it out")
        if self.exchange == "scored" and self.kind not in ("plugin", "python"):
            raise ValueError(f'exchange "scored" is for kind plugin or python; kind {self.kind} is replayed')
        if self.exchange == "scored" and not self.scored_from:
            raise ValueError(
                f'scored_from: empty, so exchange "scored" believes no observation in {self.name}; list the node ids '
                'to believe (where there are none, this node\'s own), or set exchange = "own"'
            )
        if self.scored_from and self.exchange != "scored":
            raise ValueError(f'scored_from: exchange is "{self.exchange}", which believes nobody; set "scored"')
        _ = self.inner  # raises where it is none
        return self

    @property
    def inner(self) -> "EnvironmentConfig | None":
        """The environment inside kind `retry`, else None. Raises ValueError if `params.inner` is no valid section."""
        if self.kind != "retry":
            return None
        section: object = self.params.get("inner")
        if not isinstance(section, dict):
            raise ValueError("kind retry: params.inner must be the section of another environment")
        shared = {"seed": self.seed, "num_tasks": self.num_tasks}
        inner = EnvironmentConfig.model_validate({**shared, **section, "name": self.name})
        if inner.kind == "retry":
            raise ValueError("kind retry: params.inner.kind is retry again")
        return inner

    @property
    def may_have_turns(self) -> bool:
        """True if episodes of this kind may have several turns; False if all are single answers."""
        return self.kind not in ("reasoning_gym", "jsonl", "char", "function", "python")
