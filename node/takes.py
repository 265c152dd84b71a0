"""What a node takes of the machine it is a guest on, in one line: CPU, memory, disk, upload.

Invariant: every figure is a bound of the configuration or the estimate of `run_estimate`.
"""

from node.disk_budget import disk_budget
from node.run_estimate import estimate_memory, lengths_of, read_shape
from swarm.config import NodeConfig
from swarm.config.byte_sizes import byte_words
from swarm.process import num_usable_cores
from swarm.types import Role


def takes_line(config: NodeConfig) -> str:
    """Threads, memory, disk and upload of a node (blocking: reads the model's config.json). Raises ConfigError.

    Args:
        config: with the compute dtype that `auto` means here, on which memory depends (`expectations.with_choice`).
    """
    return f"takes      {_cpu(config)}; {_memory(config)}; {_disk(config)}; {_upload(config)}"


def _cpu(config: NodeConfig) -> str:
    work = {Role.TRAINER: "to learn", Role.GENERATOR: "to generate"}
    does = [words for role, words in work.items() if role in config.roles]
    threads = "thread" if config.num_threads == 1 else "threads"
    nice = f", nice {config.niceness}" if config.niceness else ""
    room = f"(of {num_usable_cores()} cores{nice})"
    return f"{config.num_threads} {threads} {' and as many '.join(does) or 'to serve'} {room}"


def _memory(config: NodeConfig) -> str:
    shape = read_shape(config.model)
    if shape is None:
        return "memory not estimated for this architecture"
    lengths = lengths_of(config, prompt=0, has_turns=any(each.may_have_turns for each in config.environments))
    memory = estimate_memory(config, shape, lengths)
    return f"memory about {byte_words(memory.peak)} at most, beside prompts"


def _disk(config: NodeConfig) -> str:
    budget = disk_budget(config)
    if budget is None:
        return "disk not estimated for this architecture"
    return f"disk at most {byte_words(budget.total)} in {config.dir}"


def _upload(config: NodeConfig) -> str:
    if config.is_alone:
        return "no network"
    rate = config.exchange.max_upload_bytes_per_s
    return f"upload at most {byte_words(rate)}/s" if rate else "upload without limit"
