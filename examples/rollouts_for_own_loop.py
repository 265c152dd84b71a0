"""A swarm as rollout source for a trainer of your own: twenty lines of GRPO on groups that others generated.

    python examples/rollouts_for_own_loop.py LINK [STEPS] [DIRECTORY]      # LINK as the coordinator of a run prints it

Nothing is generated here. Every group went through the admission of an ordinary node: signed, fresh, its rewards
computed on this machine. The ratio to whoever generated a token is exact, as its log-prob travelled along; a group
that is too old for the clip to correct is left out.
"""

import sys

import torch

import swarm
from swarm.model.network import load_model


def loss_of(model: torch.nn.Module, group: swarm.SourcedGroup) -> torch.Tensor:
    """GRPO's clipped objective, mean over the group's tokens; Dr. GRPO's advantage."""
    advantages = torch.from_numpy(group.rewards - group.rewards.mean())
    losses: list[torch.Tensor] = []
    for each, advantage in zip(group.rollouts, advantages, strict=True):
        ids = torch.cat([torch.from_numpy(group.prompt_ids), torch.from_numpy(each.completion_ids)]).long()
        logits = model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[len(group.prompt_ids) :, None])[:, 0]
        chosen = torch.from_numpy(each.action_mask)
        ratio = (logprobs - torch.from_numpy(each.logprobs))[chosen].exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.cat(losses).mean()


def main(link: str, steps: int = 20, directory: str = "rollouts") -> None:
    with swarm.connect(link, directory=directory) as source:
        model = load_model(source.config.model).network.train()  # the run's own; any with the same tokenizer will do
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(1, steps + 1):
            groups = [group for group in source.take(4, timeout_s=120) if group.age_steps <= 4]
            for group in groups:
                (loss_of(model, group) / len(groups)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            reward = sum(float(group.rewards.mean()) for group in groups) / max(len(groups), 1)
            print(f"step {step}: {len(groups)} groups of {len(source.peers)} nodes, reward {reward:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20, *sys.argv[3:])
