"""Learning: replay buffer, optimizer step, off-policy guard, evaluation."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from swarm.config.section import Model, NotNegative, Positive, PositiveFloat, Usual


class ReplayConfig(Model):
    """The replay buffer: what a step learns from, and for how long a group may be used."""

    local_groups: Annotated[NotNegative, Usual("1..64", "pace")] = 4
    """I: own groups per step."""
    external_groups: NotNegative = 4
    """J: other nodes' groups per step, fewer when fewer are there."""
    max_age_steps: Annotated[NotNegative, Usual("..32", "steps exchange")] = 4
    """Oldest token a step may use, in optimizer steps of its producer. 0 = strictly on-policy."""
    max_age_s: Annotated[PositiveFloat, Usual("60..", "pace exchange")] = 600.0
    """Longest time between first sight of a group and its use, seconds."""
    max_reuse: Annotated[Positive, Usual("..2", "steps")] = 1
    """Most uses of one group."""
    max_groups: Annotated[Positive, Usual("64..", "pace exchange")] = 4096
    """Buffer bound, groups."""
    max_bytes: Annotated[Positive, Usual("4e6..", "pace exchange")] = 256 * 2**20
    """Buffer bound, bytes of memory: 8 answers of 256 tokens take about 50,000."""
    sampler: Literal["uniform", "fresh", "effective"] = "uniform"
    """External groups that are drawn first: any, the youngest, or those of sources with high effective sample size."""
    external: Literal["all", "positive"] = "positive"
    """`positive` drops rollouts of external groups with negative advantage (after the advantage was computed)."""
    keep_zero_variance: Annotated[bool, Usual("false", "steps")] = False
    """Groups whose rewards are all equal are learned from too, as some recipes want; else they are only counted."""
    keep_turn_signal: bool = False
    """Only those whose turns were not all rewarded alike are learned from too, as recipes over turns want."""
    barrier: Annotated[bool, Usual("false", "pace")] = False
    """Each step waits for every connected peer's rollouts of the same round: the synchronous form, for comparison."""

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> "ReplayConfig":
        if self.local_groups + self.external_groups == 0:
            raise ValueError("local_groups and external_groups are both 0: a step would have nothing to learn from")
        return self


class LearnerConfig(Model):
    """The optimizer step: recipe, AdamW and batch sizes."""

    removed: ClassVar = {"betas": [0.9, 0.99], "final_rate_share": 0.0, "share_prompt": True}

    recipe: str = "sapo_swarm"
    """A built-in recipe (`swarm recipes`) or one's own, `my_file.py:RECIPE`."""
    recipe_params: Annotated[dict[str, Any], Usual("empty", "steps")] = Field(default_factory=dict)
    """Overrides of the recipe's named constants."""
    recipe_without_logprobs: str = "sapo_swarm"
    """Learns from groups without the generator's log-probs where `recipe` cannot; empty refuses such groups."""
    recipe_text_only: str = "sapo_swarm"
    """Learns from groups of another tokenizer, or of text alone, where `recipe` cannot; empty refuses such groups."""
    learning_rate: Annotated[PositiveFloat, Usual("3e-6..3e-4", "steps")] = 1e-5
    """AdamW learning rate after warm-up, the highest of the schedule. Not set: 1e-4 for adapters and the tiny models,
    1e-5 for all weights of another model."""
    weight_decay: Annotated[float, Field(ge=0), Usual("..10", "steps signal")] = 0.0
    """AdamW weight decay."""
    max_grad_norm: Annotated[PositiveFloat, Usual("1e-3..100", "steps")] = 1.0
    """Gradient clipping by global norm."""
    warmup_steps: Annotated[NotNegative, Usual("..500", "steps")] = 0
    """Linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall to 0 at `num_steps`, in a line or half a cosine. A training that goes on with more
    `num_steps` goes on where the longer schedule is at its step."""
    updates_per_step: Annotated[int, Field(ge=1, le=64), Usual("..4", "steps")] = 1
    """Optimizer updates made of one draw, each of its share of the draw's groups; as many for each turn
    where the recipe needs `turn_updates`; still one new policy version."""
    token_budget: Annotated[Positive, Usual("256..65536", "pace machine")] = 4096
    """Tokens (padding included) of one forward pass."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the layer again there: less memory, which
    allows a larger token_budget, for more time. Log-probs and gradients stay the same."""
    num_processes: Annotated[int, Field(ge=1, le=64), Usual("..8", "machine")] = 1
    """Processes of this machine that share weights, optimizer and work of a step (FSDP2): one GPU each, or none."""
    num_steps: NotNegative = 0
    """Stop after this many steps; 0 runs until stopped."""
    at_end: Literal["stop", "serve"] = "stop"
    """After `num_steps`: `stop` ends the node, `serve` keeps it passing on groups and weights until it is stopped."""
    checkpoint_every: NotNegative = 10
    """Steps between checkpoints, at least (a large one is due after some minutes); 0 writes one at the end only."""
    deterministic: bool = False
    """Generate, step, generate, step, one after the other. For a node alone, on one kind of machine, equal seeds and
    keys give equal losses, weights and evaluations at every step, bit for bit, also when it is killed at any moment
    and restarted. Only a group that could not be scored before a kill shifts the questions after it."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "LearnerConfig":
        if self.schedule != "constant" and self.num_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule: "{self.schedule}" falls until num_steps, which is {self.num_steps} and has to be above '
                f'warmup_steps {self.warmup_steps}; set num_steps, or schedule = "constant"'
            )
        return self


class WarmUpConfig(Model):
    """Supervised warm-up before step 1: a trainer's model is shown right answers until its own begin to earn something.

    (`learner.warmup_steps` is another thing: the first steps' smaller learning rate.)
    """

    answers: str = Field(default="", pattern=r"^$|^references$|\.jsonl$")
    """`references`: those of the environments of single answers, without held-out problems. A path ending in .jsonl:
    records with the fields of the first environment's questions, and answers that its reward accepts. Empty: no
    warm-up."""
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    """Most updates, of 16 answers each. It ends before, once rewards differ in half of the groups that are tried, or
    most answers are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardLimits:
    """Thresholds of the off-policy guard for the figures of a step, the same on every node.

    docs/measurements/staleness.md compares them with data of every age; no run needed others. `alarm` is beyond
    `tight`, and `tight` beyond `loose`; between `tight` and `loose` the guard changes nothing.
    """

    tight_ess: float = 0.5  # effective sample size share below which a step (or an age) counts as bad
    loose_ess: float = 0.7  # share from which on a step counts as calm
    tight_kl: float = 0.1  # mismatch KL (k3, nats per token) above which a step (or an age) counts as bad
    loose_kl: float = 0.05
    tight_m2: float = 0.25  # second moment of the log-ratio above which a step (or an age) counts as bad
    loose_m2: float = 0.12
    # Nats per token by which another node's tokens, with or without log-probs, may be less likely under our policy than
    # our own tokens are; beyond it the source is set aside.
    tight_nll: float = 2.0
    alarm_ess: float = 0.05  # share below which updates stop
    alarm_kl: float = 1.0  # KL above which updates stop
    cap: float = 4.0  # the first level leaves out tokens whose ratio is outside [1/cap, cap]
    hold_steps: int = 4  # calm steps before anything is loosened
    freeze_steps: int = 4  # most consecutive steps without update; then the safe recipe tries again
    min_tokens: int = 32  # fewest tokens from which a figure counts


SAFE_RECIPE: Final = "gspo"
"""Recipe of the guard's second level: its ratio is that of a whole answer, and it needs nothing but log-probs."""


class GuardConfig(Model):
    """The off-policy guard, which makes a learner more careful while its data is far from its policy."""

    removed: ClassVar = {**asdict(GuardLimits()), "safe_recipe": SAFE_RECIPE}

    enabled: Annotated[bool, Usual("true", "steps")] = True
    """Off: the configured recipe and lag bound, whatever is measured."""


class EvaluationConfig(Model):
    """Evaluations of the policy: accuracy on held-out problems, and on all problems."""

    every_steps: NotNegative = 0
    """Steps between evaluations; 0: at the beginning and the end only."""
    num_problems: Annotated[Positive, Usual("..512", "pace")] = 64
    """Problems per environment and split."""
    num_tries: Annotated[int, Field(ge=0, le=256), Usual("..32", "pace")] = 0
    """Sampled tries at each problem, whose mean success is the accuracy. 0: one greedy try."""
    environments: tuple[str, ...] = ()
    """Names to evaluate; empty evaluates every environment of the run."""
    keep_best: bool = False
    """Trainer: keep the weights of the step with the best mean success on held-out problems, in `best`, for `--step
    best` of `swarm export`, `eval` and `chat`. Costs the model's size on disk."""
