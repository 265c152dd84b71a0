"""The engine for remote servers keeps the contract of engines, against a server that speaks as vLLM or SGLang do."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from engines import PROMPTS, START, canaries_of, sharp_network
from model_server import TOKENIZER, Server, engine_on, newer_of, serving

from swarm.generation import http_json
from swarm.interfaces import Generator as Engine
from swarm.model.version_digest import snapshot
from swarm.testing.engine_contract import CONTRACT, Check, EngineBench


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "FIRST_BACKOFF_S", 0.001)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    dialect, servers = request.param, dict[int, Server]()
    newer = newer_of(dialect)
    with ExitStack() as stack:

        def make() -> Engine:
            server = stack.enter_context(serving(dialect))
            engine = engine_on(server, tmp_path_factory.mktemp("weights"))
            stack.callback(engine.close)
            servers[id(engine)] = server
            return engine

        @contextmanager
        def on_token(engine: Engine, call: Callable[[], None]) -> Generator[None]:
            handle = servers[id(engine)].network.register_forward_hook(lambda *_: call())
            yield
            handle.remove()

        yield EngineBench(
            make=make,
            start=START,
            prompts=PROMPTS,
            eos_ids=TOKENIZER.eos_ids,
            newer=snapshot(newer),
            canaries=canaries_of(newer),
            misfit={name: tensor[:1] for name, tensor in snapshot(sharp_network(0)).items()},
            on_token=on_token,
            max_rows=3,
            takes_in_flight=False,
        )


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_a_remote_engine_keeps_the_contract(bench: EngineBench, check: Check) -> None:
    check(bench)
