"""Child process that unpacks a GGUF file into a Hugging Face folder: `python -m swarm.model.convert FILE FOLDER`.

Invariant: values are dequantized once and rounded to bfloat16, so every node starts from the same published tensors.
"""

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file: writes config, bfloat16 safetensors and tokenizer to an existing folder.

    Raises:
        ImportError: transformers, gguf or accelerate is missing (the learn extra).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
