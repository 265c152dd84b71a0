"""Options of `swarm train` as the configuration of an ordinary node.

Invariant: node.toml holds all that was decided; options that would change a training that has begun are an error.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from swarm.config import NODE_FILE, DiskConfig, NodeConfig, apply_overrides, load_config, parse_config
from swarm.config.generation_config import is_char_model
from swarm.environments.given_answers import REFERENCES
from swarm.environments.hub_datasets import file_name, is_dataset, write_jsonl
from swarm.errors import ConfigError
from swarm.learn.checkpoint_state import CHECKPOINTS, newest_first
from swarm.printable import as_argument
from swarm.trained.own_directories import code_of_engine, code_of_node, require_trusted
from swarm.types import JsonDict

INITIAL: Final = "initial-model"  # of a training that began from a node's checkpoint
_OF_THE_MACHINE: Final = ("num_threads", "niceness", "exchange.max_upload_bytes_per_s")
# of a directory that exists: how far the training goes, and what it takes of the machine
_CHANGEABLE: Final = frozenset({"learner.num_steps", "telemetry.log_level", *_OF_THE_MACHINE}) | {
    f"disk.{key}" for key in DiskConfig.model_fields
}

_BEFORE_STEP_1: Final = frozenset({"warm_up.answers", "warm_up.num_steps"})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of the command line; None and "" leave a default, or the value in node.toml."""

    directory: Path
    model: str = ""
    init_from: Path | None = None  # in place of a model: what another training made, a node's directory or its export
    must_exist: bool = False  # only goes on with what is in the directory
    data: Path | None = None  # a .jsonl file, or what `datasets` reads: other files, a folder, a hub id
    subset: str = ""  # of a dataset
    split: str = "train"
    reward: str = ""  # file.py:function or module:function
    reward_range: tuple[float, float] | None = None  # of what it returns
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])  # where it returns several by name
    environments: tuple[str, ...] = ()  # kind, or kind:dataset
    question: str = "question"  # fields of a record
    answer: str = "answer"
    prompt: str = "{question}"
    system: str = ""
    prefill: str = ""
    steps: int | None = None
    max_new_tokens: int | None = None
    learning_rate: float | None = None
    lora_rank: int = 0
    warm_up: str = ""  # "references", or a .jsonl file of right answers
    recipe: str = ""
    nodes: int = 1  # that train on this machine and share what they experience
    generators: int = 0  # further ones that only generate, with the weights of the first
    overrides: tuple[str, ...] = ()
    is_trusted: bool = False  # code that the directory's node.toml names is loaded, whoever made it

    @property
    def names_task(self) -> bool:
        """True if the options name an environment; otherwise only a directory with a node.toml can be resumed."""
        return self.data is not None or bool(self.environments)


def resolve(options: TrainOptions) -> NodeConfig:
    """The configuration of the node: from its directory if that has one, else from the options.

    Raises:
        ConfigError: an option is missing or wrong, or the directory is of another training; or it names code, and is
            neither own nor trusted.
    """
    path = options.directory / NODE_FILE
    if not path.is_file():
        if options.must_exist:
            raise ConfigError(
                f"--resume: {options.directory} holds no training; name the directory of one, or leave --resume out to "
                "begin there"
            )
        if not options.names_task:
            raise ConfigError(
                f"{options.directory}: nothing to resume there; say what to train on: --data FILE.jsonl, with "
                "--reward my_file.py:function unless the answer must be the same, or --env KIND[:DATASET]"
            )
        return parse_config(NodeConfig, _data(options), "swarm train")
    if not options.names_task and (given := _given(options)):
        raise ConfigError(
            f"{path} exists, and {', '.join(given)} cannot change a training that has begun: leave that out to go on "
            "with this one (before its first start --set KEY=VALUE can change each key), or say what to train on and "
            "name another --dir; of this one the keys are in that file"
        )
    changes = list(options.overrides)
    changes += [] if options.steps is None else [f"learner.num_steps={options.steps}"]
    changes += [f"warm_up.answers={json.dumps(_answers(options))}"] if options.warm_up else []
    # `dir` in the file is seen from where the training was begun, which need not be here.
    here = {"dir": options.directory}
    kept = load_config(NodeConfig, path).model_copy(update=here)
    config = load_config(NodeConfig, path, changes).model_copy(update=here)
    asked = parse_config(NodeConfig, _data(options), "swarm train") if options.names_task else config
    code, given = (code_of_node(each) | code_of_engine(each) for each in (config, asked))
    named = given.values() if options.names_task else options.overrides
    require_trusted(options.directory, code, options.is_trusted, named)
    may_change = _CHANGEABLE if newest_first(options.directory / CHECKPOINTS) else _CHANGEABLE | _BEFORE_STEP_1
    differing = [key for key in _differences(kept.model_dump(), asked.model_dump()) if key not in may_change]
    if differing and (options.names_task or (options.directory / "events.jsonl").exists()):
        raise ConfigError(
            f"{path} exists and says otherwise for {', '.join(sorted(differing)[:5])}: name another --dir for another "
            f"training, or delete this one; `swarm train {as_argument(options.directory)}` alone goes on with it"
        )
    return config


def _data(options: TrainOptions) -> JsonDict:
    """Plain data of node.toml, from the options. Raises ConfigError."""
    if options.init_from is not None and options.model:
        raise ConfigError(f"--model {options.model} and --init-from {options.init_from}: both name a model; give one")
    model = options.model if options.init_from is None else _made_by(options.init_from, options.directory)
    if not model:
        raise ConfigError(
            "--model: name one: smollm2, a folder, or a hub id; tiny and tiny-agents know little tasks only; or "
            "--init-from what another training made"
        )
    if options.nodes < 1 or options.generators < 0:
        raise ConfigError(
            f"nodes {options.nodes}, generators {options.generators}: expected one node at least, and no fewer than 0 "
            "generators"
        )
    is_tiny, has_others = is_char_model(model), options.nodes > 1 or options.generators > 0
    longest = options.max_new_tokens or (16 if is_tiny else 256)
    data: JsonDict = {
        "dir": str(options.directory),
        "name": options.directory.name[:40],
        "run_id": "train",
        "worker": "inline" if is_tiny else "process",
        "environments": _environments(options),
        "model": {
            "source": _absolute(model),
            "dtype": "float32" if is_tiny else "bfloat16",
            "lora_rank": options.lora_rank,
        },
        "generator": {"max_new_tokens": longest, "groups_per_batch": 8},
        "replay": {"local_groups": 8, "external_groups": 4 if options.nodes > 1 else 0},
        "learner": {
            "num_steps": 100 if options.steps is None else options.steps,
        }
        | ({} if options.learning_rate is None else {"learning_rate": options.learning_rate})
        | ({"recipe": _own_file(options.recipe)} if options.recipe else {}),
        "warm_up": {"answers": _answers(options)},
        "evaluation": {"every_steps": 20, "num_problems": 32, "keep_best": True},
        "directory": {"kind": "dht" if has_others else "none"},
        "weights": {"publish": options.generators > 0},
        "telemetry": {"log_level": "WARNING"},
    }
    apply_overrides(NodeConfig, data, list(options.overrides))
    return data


def _made_by(origin: Path, directory: Path) -> str:
    """The model of another training as a folder: `origin` itself, or an export of a node's newest checkpoint."""
    if not (origin / NODE_FILE).is_file():
        return str(origin)
    folder = directory / INITIAL
    if not folder.exists():
        from swarm.trained.export import export_model

        export_model(origin, folder, "hf", None, time.time())
    return str(folder)


def _environments(options: TrainOptions) -> list[JsonDict]:
    style: JsonDict = {"prompt": options.prompt, "system": options.system, "prefill": options.prefill}
    found: list[JsonDict] = []
    if options.data is not None:
        source = str(options.data)
        if is_dataset(source):
            name = file_name(source, options.subset, options.split)
            source = str(write_jsonl(source, options.directory / "data" / name, options.subset, options.split))
        fields: JsonDict = {
            "path": _absolute(source),
            "question": options.question,
            "answer": options.answer,
        }
        kind = "function" if options.reward else "jsonl"
        dataset = _own_file(options.reward) if options.reward else fields["path"]
        scale: JsonDict = {} if options.reward_range is None else {"reward_range": list(options.reward_range)}
        scale |= {"reward_weights": dict(options.reward_weights)} if options.reward_weights else {}
        found.append({"name": "own", "kind": kind, "dataset": dataset, "params": fields, **style, **scale})
    elif options.reward:
        raise ConfigError(f"--reward {options.reward}: needs the questions, --data FILE.jsonl")
    for text in options.environments:
        kind, _, dataset = text.partition(":")
        own = dataset.rpartition(":")[2] if ".py:" in dataset else dataset  # a file of the user's: its class
        own = Path(own).stem if kind == "python" else own
        name = "".join(c if c.isalnum() else "_" for c in (own or kind).lower()).strip("_")[:40]
        names: JsonDict = {"question": options.question, "answer": options.answer}
        files: JsonDict = (
            {"dataset": _absolute(dataset), "exchange": "own", "params": names} if kind == "python" else {}
        )
        found.append({"name": name, "kind": kind, "dataset": _own_file(dataset), **style, **files})
    return found


def _answers(options: TrainOptions) -> str:
    return options.warm_up if options.warm_up in ("", REFERENCES) else _absolute(options.warm_up)


def _absolute(source: str) -> str:
    """An existing path in absolute form; any other name unchanged."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _own_file(spec: str) -> str:
    path, colon, name = spec.rpartition(":")
    return f"{_absolute(path)}{colon}{name}" if path.endswith(".py") else spec


def _given(options: TrainOptions) -> list[str]:
    """Command-line names of the given options that a training that has begun cannot take."""
    kept = {
        name: getattr(options, name)
        for name in ("directory", "steps", "overrides", "must_exist", "is_trusted", "warm_up")
    }
    unsaid = TrainOptions(**kept)
    names = [each.name for each in fields(options) if getattr(options, each.name) != getattr(unsaid, each.name)]
    spelled = {"learning_rate": "--lr", "reward_weights": "--reward-weight"}
    return [spelled.get(name, f"--{name.replace('_', '-')}") for name in names]


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in one.keys() | other.keys():
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            keys += _differences(left, right, f"{prefix}{key}.")
        elif left != right:
            keys.append(f"{prefix}{key}")
    return keys
