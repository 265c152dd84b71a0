"""A folder in which names of the hub are local: a tiny Llama with random weights, and data of the shapes of two sets.

    python tests/extras/tinker_world.py FOLDER

    FOLDER/meta-llama/Llama-3.2-1B      a byte tokenizer, in which every second token is \\boxed{0} to \\boxed{3}
    FOLDER/openai/gsm8k                 questions whose answers are 0 to 3
    FOLDER/HuggingFaceH4/no_robots      conversations
    FOLDER/Anthropic/hh-rlhf            two answers, the better one first
    FOLDER/hicai-zju/SciKnowEval        questions with choices
    FOLDER/markets.csv                  markets that resolved, as Prophet Arena has them

A random policy over those tokens is right one time in four, so that rewards of a group differ.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any, Final, cast

MODEL: Final = "meta-llama/Llama-3.2-1B"
NUM_BOXED: Final = 256
_END: Final = "<|end|>"
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_world(folder: Path) -> Path:
    """Writes all of it; returns the folder of the model."""
    model = folder / MODEL
    write_model(model)
    gsm8k, robots = folder / "openai" / "gsm8k", folder / "HuggingFaceH4" / "no_robots"
    sums = [(a, b) for a in range(4) for b in range(4) if a + b < 4]
    for split in ("train", "test"):
        rows = [{"question": f"{a}+{b}?", "answer": f"It is {a + b}.\n#### {a + b}"} for a, b in (sums * 4)[:16]]
        _write_rows(gsm8k / "main" / f"{split}.jsonl", rows)
        talks = [
            {
                "prompt": f"say {n}",
                "messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} {n}"}],
            }
            for n in range(16)
        ]
        _write_rows(robots / f"{split}.jsonl", talks)
    _write_card(gsm8k, "main", "main/")
    _write_card(robots, "default", "")
    pairs, choices = folder / "Anthropic" / "hh-rlhf", folder / "hicai-zju" / "SciKnowEval"
    for split in ("train", "test"):
        asked = [f"\n\nHuman: say {n}\n\nAssistant:" for n in range(16)]
        _write_rows(pairs / f"{split}.jsonl", [{"chosen": f"{text} yes", "rejected": f"{text} no"} for text in asked])
    about = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices"}
    letters = {"label": ["A", "B"], "text": ["an acid", "a base"]}
    rows = [{**about, "question": f"What is {n}?", "choices": letters, "answerKey": "AB"[n % 2]} for n in range(16)]
    _write_rows(choices / "test.jsonl", rows)
    _write_card(pairs, "default", "")
    _write_card(choices, "default", "", ("test",))
    _write_markets(folder / "markets.csv")
    return model


def _write_markets(path: Path) -> None:
    """Writes markets of two years, of which every second one resolved with yes."""
    sources = json.dumps([{"title": "rain", "summary": "it rained"}])
    rows = [
        {
            "submission_id": f"s{n}",
            "event_ticker": f"e{n}",
            "title": f"event {n}",
            "snapshot_time": f"{year}-02-01T00:00:00Z",
            "close_time": f"{year}-02-05T00:00:00Z",
            "market_outcome": json.dumps({f"m{n}": n % 2}),
            "category": "rain",
            "markets": json.dumps([f"m{n}"]),
            "sources": sources,
        }
        for year in (2025, 2026)
        for n in range(100 * year, 100 * year + 16)
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_model(folder: Path, seed: int = 0) -> None:
    """A Llama of 0.2M parameters with random weights in float32, and its tokenizer."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    boxed = [f"\\boxed{{{number % 4}}}" + "." * (number // 4) for number in range(NUM_BOXED)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in boxed])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(_END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cast("Any", LlamaForCausalLM(config)).save_pretrained(folder)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_card(folder: Path, name: str, below: str, splits: tuple[str, ...] = ("train", "test")) -> None:
    """Writes the card from which `datasets` reads a folder's configurations and splits."""
    lines = [
        "---",
        "configs:",
        f"- config_name: {name}",
        "  data_files:",
        *(line for split in splits for line in (f"  - split: {split}", f"    path: {below}{split}.jsonl")),
        "---",
    ]
    (folder / "README.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    make_world(Path(sys.argv[1]))
