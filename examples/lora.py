"""LoRA on one GPU: adapters are trained, and come out as a PEFT folder or merged.

    python examples/lora.py [STEPS] [MODEL] [DIRECTORY]

`100 Qwen/Qwen3-0.6B` trains adapters of rank 16 on problems of reasoning-gym, on the GPU where torch sees one. With
`3 tiny` it shows in seconds on a CPU that the parts fit: sums become letters, and little is learned.
"""

import sys

import swarm


def main(steps: int = 100, model: str = "Qwen/Qwen3-0.6B", directory: str = "lora") -> None:
    is_tiny = model == "tiny"
    run = swarm.train(
        model,
        environments=("char:sort",) if is_tiny else ("reasoning_gym:gcd", "reasoning_gym:simple_equations"),
        directory=directory,
        steps=steps,
        lora_rank=4 if is_tiny else 16,
        learning_rate=1e-4,
        overrides=(
            "model.lora_alpha=32",
            "learner.schedule=cosine",
            "learner.gradient_checkpointing=true",  # about half the memory
            "learner.token_budget=8192",
        ),
    )
    figures = run.evaluate(num_problems=8 if is_tiny else 128, num_tries=4)
    print({name: round(value, 2) for name, value in figures.items()})
    print("adapter:", run.save_pretrained(f"{directory}-adapter", format="peft"))  # PeftModel.from_pretrained, vLLM
    print("merged:", run.save_pretrained(f"{directory}-merged"))


if __name__ == "__main__":
    main(*(int(each) if each.isdecimal() else each for each in sys.argv[1:]))  # type: ignore[arg-type]
