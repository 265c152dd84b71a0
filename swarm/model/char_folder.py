"""The tiny character model as a folder in Hugging Face layout, with a tokenizer that transformers and vLLM can load.

Invariant: `AutoTokenizer` of this folder gives the ids that `CharTokenizer` gives.
"""

import json
from pathlib import Path
from typing import Any

from swarm.config.generation_config import CHAR_CODEC, CHAR_CODEC_VERSION
from swarm.model.tokenizer import ALPHABET, CharTokenizer

_PAD, _END = "<pad>", "<end>"
# As CharTokenizer joins them: contents one after the other, the end token after each turn of the model.
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)


def write_char_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json of the character tokenizer.

    Raises:
        ImportError: tokenizers is missing (the learn extra).
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    codec = CharTokenizer()
    vocab = {_PAD: codec.pad_id, _END: codec.eos_id}
    vocab |= {char: index for char in ALPHABET for index in codec.encode_response(char)[:1]}
    made = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([_PAD, _END])
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _PAD,
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
        CHAR_CODEC: CHAR_CODEC_VERSION,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
