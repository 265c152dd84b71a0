"""A model server for tests: HTTP as vLLM or SGLang speak it, over tiny networks, with faults on demand."""

import copy
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from engines import START, sharp_network
from safetensors.torch import load_file

from swarm.errors import ConfigError
from swarm.generation.http_json import JsonClient
from swarm.generation.openai_dialects import find_server
from swarm.generation.openai_engine import OpenAIGenerator
from swarm.generation.openai_weights import DiskWeights, LoraAdapters
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.lora import add_adapters
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import load_published, snapshot
from swarm.types import PolicyVersion, Sampling

NEXT = PolicyVersion(policy_id="a", step=5)
TOKENIZER = CharTokenizer()
RANK = 2


def adapted(seed: int) -> torch.nn.Module:
    """The first network with adapters that change it."""
    network = sharp_network(0)
    add_adapters(network, RANK, seed=seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in network.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)
    return network


class Server(ThreadingHTTPServer):
    """One model server, of either dialect."""

    daemon_threads = True

    def __init__(self, dialect: str, network: torch.nn.Module | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.dialect = dialect
        self.network = network or sharp_network(0)
        self.engines = {"tiny": TransformersGenerator(self.network, TOKENIZER, START, 0)}
        self.weight_version = "default"
        self.key = ""
        self.failures: list[int] = []  # statuses of the next answers
        self.never: set[str] = set()  # paths that are always refused
        self.lacks: set[str] = set()  # fields left out of completions
        self.is_raw = False  # log-probs at temperature 1, as vLLM's default
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.seen.append((path, body))
        if self.failures:
            return self.failures.pop(0), {"error": {"message": "as told"}}
        if path in self.never:
            return 400, {"success": False, "message": "refused as told"}
        routes = {
            "/v1/models": self.models,
            "/v1/completions": self.completions,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/generate": self.generate,
            "/update_weights_from_disk": self.update,
        }
        return routes[path](body)

    def models(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": name, "owned_by": self.dialect} for name in self.engines]}

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        engine = self.engines.get(body["model"])
        if engine is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        choice: dict[str, Any] = {"index": 0}
        if "prompt_logprobs" in body:
            scores = engine.score([body["prompt"]])[0].tolist()
            choice["prompt_logprobs"] = [
                None if place == 0 else {str(token): {"logprob": scores[place], "rank": 1, "decoded_token": "?"}}
                for place, token in enumerate(body["prompt"])
            ]
        else:
            ids, logprobs, choice["finish_reason"] = self.sampled(engine, body["prompt"], body, body["max_tokens"])
            choice |= {"text": TOKENIZER.decode(ids), "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
        return 200, {"choices": [{name: value for name, value in choice.items() if name not in self.lacks}]}

    def sampled(
        self, engine: TransformersGenerator, prompt: list[int], how: dict[str, Any], count: int
    ) -> tuple[list[int], list[float], str]:
        if how["temperature"] == 0:
            ids = TOKENIZER.encode_response(engine.greedy([prompt], count)[0][0])[:count]
            return ids, [0.0] * len(ids), "length"
        sampling = Sampling(temperature=how["temperature"], top_p=how["top_p"], max_new_tokens=count)
        seed = how.get("seed", how.get("sampling_seed"))
        (rollout,) = engine.generate([prompt], 1, sampling, None if seed is None else [seed])[0]
        assert rollout.trace is not None and rollout.trace.logprobs is not None
        ids, logprobs = rollout.trace.token_ids.tolist(), rollout.trace.logprobs.tolist()
        if self.is_raw:
            logprobs = engine.score([prompt + ids])[0][len(prompt) :].tolist()
        return ids, logprobs, rollout.finish.value

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        engine, prompt, how = self.engines["tiny"], body["input_ids"], body["sampling_params"]
        meta: dict[str, Any] = {"weight_version": self.weight_version}
        if body.get("logprob_start_len") == 0:
            scores: list[Any] = [None, *engine.score([prompt])[0][1:].tolist()]
            meta["input_token_logprobs"] = [[score, token, None] for score, token in zip(scores, prompt, strict=True)]
        else:
            ids, logprobs, finish = self.sampled(engine, prompt, how, how["max_new_tokens"])
            meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
            meta["finish_reason"] = {"type": finish}
        return 200, {"text": "", "meta_info": meta}

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            self.engines["tiny"].load(START, load_file(Path(body["model_path"]) / "model.safetensors"))
        except (ConfigError, OSError) as error:
            return 400, {"success": False, "message": str(error)}
        self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def load_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        network = copy.deepcopy(self.network)
        add_adapters(network, config["r"], config["lora_alpha"] / config["r"])
        assert config["lora_alpha"] / config["r"] == 2.0 and "q_proj" in config["target_modules"]
        ours = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
        state = {}
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            module, matrix, weight = name.removeprefix("base_model.model.").rsplit(".", 2)
            state[f"{module}.{ours[f'{matrix}.{weight}']}"] = tensor
        load_published(network, state)
        assert body["lora_name"] not in self.engines
        self.engines[body["lora_name"]] = TransformersGenerator(network, TOKENIZER, START, 0)
        return 200, "Success: LoRA adapter added successfully."

    def unload_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = self.engines.pop(body["lora_name"], None)
        return (200, "Success") if found else (404, {"error": {"message": "cannot be found"}})


class Handler(BaseHTTPRequestHandler):
    @property
    def owner(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        self.reply(self.owner.answer(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.owner.key and self.headers["Authorization"] != f"Bearer {self.owner.key}":
            self.reply((401, {"error": "Unauthorized"}))
        else:
            self.reply(self.owner.answer(self.path, body))

    def reply(self, answer: tuple[int, Any]) -> None:
        content = answer[1].encode() if isinstance(answer[1], str) else json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def serving(dialect: str, network: torch.nn.Module | None = None) -> Generator[Server]:
    server = Server(dialect, network)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def engine_on(server: Server, folder: Path) -> OpenAIGenerator:
    client = JsonClient(server.url.removesuffix("/v1"))
    found = find_server(client, "", TOKENIZER.eos_ids)
    if server.dialect == "sglang":
        taking = DiskWeights(client, folder, snapshot(server.network))
    else:
        taking = LoraAdapters(client, "tiny", folder, 2.0)
    return OpenAIGenerator(client, found, taking, TOKENIZER, START, 0, max_rows=3, tolerance=1e-3)


def newer_of(dialect: str) -> torch.nn.Module:
    return sharp_network(7) if dialect == "sglang" else adapted(7)
