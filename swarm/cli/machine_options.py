"""Options of `swarm join` and `swarm train` for the share of the machine that a node may use.

Invariant: each is a key of the configuration under another name.
"""

from typing import Annotated

import typer

from swarm.config.byte_sizes import parse_bytes

Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of every process to learn, and as many to generate (num_threads). Default 1."),
]
MaxUpload = Annotated[str, typer.Option(help="Most bytes to peers, such as 2MB/s (exchange.max_upload_bytes_per_s).")]
MaxDisk = Annotated[
    str,
    typer.Option(
        help="Most bytes of the directory, such as 20GB (disk.max_bytes); `swarm check` shows how they are split."
    ),
]


def machine_overrides(threads: int | None, max_upload: str, max_disk: str) -> list[str]:
    """The options as `key=value` of the configuration. Raises ConfigError where one cannot be read."""
    overrides = [] if threads is None else [f"num_threads={threads}"]
    if max_upload:
        rate = parse_bytes(max_upload, "--max-upload", is_rate=True)
        overrides.append(f"exchange.max_upload_bytes_per_s={rate}")
    if max_disk:
        overrides.append(f"disk.max_bytes={parse_bytes(max_disk, '--max-disk')}")
    return overrides
