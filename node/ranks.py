"""Ranks: the processes of one node that share a policy too large for one GPU; otherwise one process.

Invariant: only rank 0 is connected to the agent; the others repeat its learner's steps, and all end with the process
that started them.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from node.status_figures import COMPUTE_FILE
from swarm.activity import MEASURING, OnProgress, ignore_progress
from swarm.config import SAFE_RECIPE, NodeConfig
from swarm.identity import Identity
from swarm.interfaces import Environment
from swarm.learn.checkpoint_state import CHECKPOINTS, newest_compute_dtype
from swarm.process import freeze_gc
from swarm.telemetry.warning_log import SLOW_DTYPE
from swarm.types import NodeId, Role

if TYPE_CHECKING:
    import torch

    from swarm.learn.data_parallel import ShardedRanks
    from swarm.learn.learner import PolicyLearner
    from swarm.learn.ranks import Ranks
    from swarm.model.compute_choice import ComputeChoice
    from swarm.model.network import LoadedModel
    from swarm.objectives.fallbacks import RecipeSet


logger = logging.getLogger(__name__)

EXIT_CONFIG = 2  # the configuration cannot work: starting again would not help; the message is on stdout
STORE_VARIABLE = "SWARM_RANKS_STORE"  # a file through which the ranks of one worker meet; only `launch` sets it
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    STORE_VARIABLE,
)


def num_ranks(config: NodeConfig) -> int:
    """Number of processes that the worker of this node consists of."""
    return config.learner.num_processes if Role.TRAINER in config.roles else 1


def own_rank() -> int | None:
    """Rank of this process under `launch`; None elsewhere, also inside another launcher."""
    return int(os.environ["RANK"]) if STORE_VARIABLE in os.environ else None


def forget_rank() -> None:
    """Removes the rank variables of launchers from the environment: child processes are no ranks."""
    for name in [name for name in os.environ if name in _RANK_VARIABLES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def launch(count: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` in `count` processes of this machine, as `torchrun --standalone` does (blocking).

    Returns:
        0; or the exit code of a failed process, with which the others are ended; or 128 + the signal that ended all.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    freeze_gc()
    # They meet through files: torch's TCP stores have no password and listen on every interface.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="swarm-ranks-") as folder:
        os.environ[STORE_VARIABLE] = f"{folder}/group"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/launch",
            rdzv_configs={"store_type": "file"},
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs"),  # else it leaves a folder behind each time
            max_restarts=0,  # the agent starts the whole worker again
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            return EXIT_CONFIG if EXIT_CONFIG in codes else max(codes)  # others only lost that one, or were ended
        except SignalException as error:
            return 128 + error.sigval
        return 0


def join(config: NodeConfig) -> "ShardedRanks | None":
    """The processes that share the learner; None for a single process. Raises ConfigError if torch cannot do it."""
    if num_ranks(config) == 1:
        return None
    from swarm.learn.data_parallel import ShardedRanks

    ranks = ShardedRanks.start(os.environ[STORE_VARIABLE])
    forget_rank()
    return ranks


def open_policy(
    config: NodeConfig,
    node_id: NodeId,
    loaded: "LoadedModel",
    recipes: "RecipeSet",
    environments: Mapping[str, Environment],
    ranks: "ShardedRanks | None",
    on_progress: OnProgress = ignore_progress,
) -> "PolicyLearner":
    """The learner, or this rank's share of it, resumed from its newest checkpoint. Raises ConfigError."""
    from swarm.learn.learner import PolicyLearner
    from swarm.learn.ranks import OneProcess
    from swarm.model.device import pick_device
    from swarm.model.published_dtype import widen
    from swarm.telemetry.shown_updates import write_update

    processes = ranks or OneProcess(pick_device(config.device))
    processes.on_progress = on_progress
    widen(loaded.network, _agreed_dtype(config, loaded, processes))
    kind, is_first = PolicyLearner, ranks is None or ranks.index == 0
    if ranks is not None and is_first:
        from swarm.learn.leader import LeadingLearner as kind
    return kind(
        network=loaded.network,
        tokenizer=loaded.tokenizer,
        recipe=recipes,
        config=config.learner,
        replay=config.replay,
        policy_id=node_id,
        dir=config.dir / CHECKPOINTS,
        num_kept=config.disk.kept_checkpoints,
        ranks=processes,
        task_of=lambda env, task_id: environments[env].task(task_id),
        answer_of=lambda env, task_id: environments[env].reference(task_id),
        show=partial(write_update, config.dir) if is_first else None,
    ).resume()


def _agreed_dtype(config: NodeConfig, loaded: "LoadedModel", processes: "Ranks") -> "torch.dtype":
    """The compute dtype that the first process chooses, the same on all of them (blocking)."""
    import torch

    from swarm.model.compute_dtype import choose, products_of

    is_bfloat16 = False
    processes.on_progress(MEASURING)
    if processes.index == 0:
        saved = newest_compute_dtype(config.dir / CHECKPOINTS, config.model.dtype)
        products = products_of(loaded.network)
        choice = choose(config.compute_dtype, config.model.dtype, processes.device, products, saved)
        note_choice(config, choice)
        is_bfloat16 = choice.dtype == "bfloat16"
    return torch.bfloat16 if bool(processes.broadcast(torch.tensor([is_bfloat16]))) else torch.float32


def note_choice(config: NodeConfig, choice: "ComputeChoice") -> None:
    """Writes the dtype of passes into the log and for `swarm status`, with a warning if it is slow here."""
    logger.info("passes are computed in %s", choice.words)
    with suppress(OSError):  # a full disk
        (config.dir / COMPUTE_FILE).write_text(choice.words, encoding="utf-8")
    if choice.is_slow:
        logger.warning(SLOW_DTYPE, extra={"dtype": choice.words, "fix": choice.advice})


def follow_leader(config: NodeConfig) -> None:
    """Makes, on every rank but the first, the steps that the first rank makes, until that rank stops (blocking).

    Raises:
        ConfigError: as on the first rank.
    """
    import torch

    from swarm.environments.load import build_environments
    from swarm.learn.leader import obey_leader
    from swarm.model.network import load_model
    from swarm.objectives.methods import load_recipe, recipes_of

    torch.set_num_threads(config.num_threads)
    environments = build_environments(config.environments)
    node_id = Identity.load(config.dir / "identity.key").node_id
    loaded = load_model(config.model)
    ranks = join(config)
    assert ranks is not None
    policy = open_policy(config, node_id, loaded, recipes_of(config), environments, ranks)
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all: the first rank finishes its step, then says stop
        signal.signal(number, signal.SIG_IGN)
    freeze_gc()
    obey_leader(policy, ranks, load_recipe(SAFE_RECIPE))
    ranks.stop()
