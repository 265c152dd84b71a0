"""A swarm as rollout source for TRL's GRPOTrainer: others generate, TRL trains.

    pip install trl==1.16.0
    python examples/rollouts_for_trl.py LINK MODEL [STEPS] [DIRECTORY]      # MODEL: the run's, as a folder or hub id

TRL asks its `rollout_func` for completions and gets groups that nodes of the run generated, checked here; `reward` is
what this machine's verifier gave. TRL without vLLM takes samples for its own: `OffPolicyTrainer` puts the generator's
log-probs where TRL looks for the denominator of its ratio, so that its clip holds against the true generator.
"""

import sys
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import swarm

GROUP = 8  # as generator.group_size of the run


class OffPolicyTrainer(GRPOTrainer):  # pyright: ignore[reportUntypedBaseClass]
    """GRPO whose ratios are those to the policy that generated."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return output | {"old_per_token_logps": output["sampling_per_token_logps"]}


def reward(completions: Any, reward: list[float], **_: Any) -> list[float]:
    """Passes on what came along."""
    return reward


def main(link: str, model: str, steps: int = 10, directory: str = "rollouts") -> None:
    with swarm.connect(link, directory=directory) as source:

        def rollouts(prompts: list[Any], _: Any) -> dict[str, list[Any]]:
            return swarm.trl_columns(source.take(len(prompts) // GROUP, timeout_s=120))

        has_gpu = torch.cuda.is_available()
        tasks = ["(comes with the group)"] * steps * GROUP  # TRL counts its steps by prompts
        trainer = OffPolicyTrainer(
            model=model,
            reward_funcs=reward,
            rollout_func=rollouts,
            train_dataset=Dataset.from_dict({"prompt": tasks}),
            args=GRPOConfig(
                output_dir=f"{directory}/trl",
                max_steps=steps,
                num_generations=GROUP,
                per_device_train_batch_size=2 * GROUP,
                learning_rate=1e-5,
                beta=0.0,
                logging_steps=1,
                bf16=has_gpu,
                use_cpu=not has_gpu,
                report_to=[],
            ),
        )
        trainer.train()
        trainer.save_model(f"{directory}/trl-model")
        print([round(each["reward"], 3) for each in trainer.state.log_history if "reward" in each])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 10, *sys.argv[4:])
