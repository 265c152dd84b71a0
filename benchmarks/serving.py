"""Cost of serving a policy beside its engine, and tokens that conversations do not keep.

    python -m benchmarks.serving              CPU of the server's process for a call, over that of the engine alone
    python -m benchmarks.serving --drift      conversations of a client that sends texts: tokens that were not kept

The same requests are asked of the engine directly and over HTTP, by as many callers at once, in rounds that alternate;
the clients are a process of their own, which is not counted. The model is the tiny one: engine and server share a
process, and with it Python's lock, so that its steps of about 2 ms are the worst case.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

from swarm.config import ModelConfig
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import CompletionRequest, Tokenizer
from swarm.model.network import load_model, tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.serving.http_server import HttpServer
from swarm.serving.openai_app import OpenAiApp, ServedModel
from swarm.types import PolicyVersion, Sampling

KEY: Final = "key-of-the-benchmark"
TOKENS: Final = 32
VERSION: Final = PolicyVersion(policy_id="benchmark", step=0)


def measure(clients: int, calls: int, rounds: int) -> list[tuple[float, float]]:
    """CPU of a call in ms, of the engine alone and over HTTP, in each round."""
    tokenizer = CharTokenizer()
    tokenizer.eos_ids = frozenset()  # every answer has TOKENS tokens
    engine = TransformersGenerator(tiny_network(), tokenizer, VERSION, 0, max_rows=64)
    model = ServedModel(name="tiny", completer=engine, tokenizer=tokenizer, context_tokens=128)
    server = HttpServer(OpenAiApp(model, KEY).routes)
    port = server.start("127.0.0.1", 0)
    prompt = list(range(5, 29))
    body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "logprobs": 0, "return_token_ids": True, "seed": 1})

    def direct() -> None:
        request = CompletionRequest(prompt_ids=prompt, sampling=Sampling(max_new_tokens=TOKENS), seed=1)
        left, ended = itertools.count(), threading.Semaphore(0)

        def ask(_: object = None) -> None:  # from the engine's thread: no caller's thread costs anything
            if next(left) < clients * calls:
                engine.complete(request).add_done_callback(ask)
            else:
                ended.release()

        for _ in range(clients):
            ask()
        for _ in range(clients):
            ended.acquire()

    def over_http() -> None:
        arguments = [str(port), KEY, str(clients), str(calls), body]
        subprocess.run([sys.executable, "-m", "benchmarks._http_load", *arguments], check=True)

    def cost_ms(act: Any) -> float:
        before_s = time.process_time()
        act()
        return 1e3 * (time.process_time() - before_s) / (clients * calls)

    direct()
    found = [(cost_ms(direct), cost_ms(over_http)) for _ in range(rounds)]
    server.stop()
    engine.close()
    return found


def measure_drift(num_tokens: int, seed: int) -> tuple[int, int, int]:
    """Plays chats over HTTP until so many tokens were read or made again.

    Returns:
        Tokens of earlier turns that a prompt had to begin with, those of them that it did not, and answers.
    """
    loaded = load_model(ModelConfig(source="smollm2", dtype="bfloat16"))
    network = random_network(loaded.tokenizer)
    engine = TransformersGenerator(network, loaded.tokenizer, VERSION, 0)
    model = ServedModel(name="random", completer=engine, tokenizer=loaded.tokenizer, context_tokens=8192)
    server = HttpServer(OpenAiApp(model, KEY).routes)
    port = server.start("127.0.0.1", 0)
    rng = random.Random(seed)
    kept = drifted = answers = 0
    while kept < num_tokens:
        messages: list[dict[str, str]] = []
        before: list[int] = []
        for _ in range(rng.randrange(2, 8)):
            messages.append({"role": "user", "content": _words(rng)})
            reply = _ask(port, {"messages": messages, "max_tokens": rng.randrange(1, 60), "return_token_ids": True})
            prompt = reply["prompt_token_ids"]
            pairs = zip(before, [*prompt, *[None] * len(before)], strict=False)
            drifted += sum(one != other for one, other in pairs)
            kept += len(before)
            answers += 1
            before = [*prompt, *reply["choices"][0]["token_ids"]]
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        print(f"{kept} tokens of earlier turns, {drifted} drifted, {answers} answers", file=sys.stderr, flush=True)
    server.stop()
    engine.close()
    return kept, drifted, answers


def random_network(tokenizer: Tokenizer) -> Any:
    """A small network over a real vocabulary whose answers are cuts of text that no tokenizer would make."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def _ask(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(["what", "is", "three", "times", "seven", "\n", "<|im_end|>", "?"]) for _ in range(8))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--tokens", type=int, default=100_000, help="of --drift")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.drift:
        kept, drifted, answers = measure_drift(chosen.tokens, chosen.seed)
        print(f"{drifted} of {kept} tokens of earlier turns were others in a later prompt ({answers} answers)")
        return
    print("| callers at once | engine alone, CPU ms a call | over HTTP | difference, median (least, most) |")
    print("|---|---|---|---|")
    for clients, calls in ((1, 100), (64, 10)):
        found = measure(clients, calls, chosen.rounds)
        alone, served = (statistics.median(values) for values in zip(*found, strict=True))
        more = sorted(b - a for a, b in found)
        difference = f"{statistics.median(more):.2f} ({more[0]:.2f}, {more[-1]:.2f})"
        print(f"| {clients} | {alone:.2f} | {served:.2f} | {difference} |")


if __name__ == "__main__":
    main()
