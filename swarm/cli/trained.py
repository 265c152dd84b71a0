"""Commands about the work of a node (samples) and about its model (export, verify, chat)."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from swarm.cli.shared_options import Trust
from swarm.command_line import Waiting, waiting
from swarm.config import NODE_FILE
from swarm.errors import ConfigError
from swarm.printable import printable

if TYPE_CHECKING:
    from swarm.trained.formats import Format
    from swarm.trained.hub import Pushed
    from swarm.trained.model import WhichStep
    from swarm.trained.samples import Sample

console = Console()
PROVENANCE_FILE = "provenance.json"  # of an export


def _step(text: str) -> "WhichStep":
    if text != "best" and not text.isdecimal():
        raise typer.BadParameter(f"{text!r}: expected the number of a step, or best")
    return "best" if text == "best" else int(text)


Target = Annotated[
    str,
    Argument(help="Directory of a node (its newest checkpoint), folder of a model, hub id, or smollm2 or tiny."),
]
Step = Annotated[
    Any,  # int, "best" or None; typer takes no such union
    Option("--step", parser=_step, metavar="N|best", help="Checkpoint of the node, or best. Default: the newest."),
]
Device = Annotated[str, Option("--device", help="auto, cpu, or cuda:0 and so on.")]


def export(
    directory: Annotated[Path, Argument(help="Directory of the node, running or not; or an export.")],
    folder: Annotated[Path | None, Argument(help="Folder to make; optional with --push.", show_default=False)] = None,
    kind: Annotated[
        str,
        Option(
            "--format",
            help="hf (a Hugging Face folder, adapters merged), peft (the adapter alone), gguf (llama.cpp, Ollama).",
        ),
    ] = "hf",
    step: Step = None,
    push: Annotated[
        str, Option("--push", metavar="NAME|OWNER/NAME", help="Name on the Hugging Face hub to upload to.")
    ] = "",
    public: Annotated[bool, Option("--public", help="With --push: visible to everybody.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="With --push: only list the files.")] = False,
) -> None:
    """Take a trained model out: files for transformers, vLLM, PEFT or llama.cpp, with a model card.

    The model is that of the node's newest checkpoint; a stop with Ctrl-C saves one. provenance.json names the run,
    the recipe and the peers that made it, and is signed by the node.

      swarm export swarm-node my-model                    a folder for from_pretrained("my-model")
      swarm export swarm-node my-model --push my-model    the same, and on the hub, private
      swarm export my-model --push my-model               an export that was made before
    """
    from swarm.trained.formats import require_format

    known = require_format(kind)
    if not push and (public or dry_run or folder is None):
        what = "FOLDER: name the folder to make" if folder is None else "--public and --dry-run are of an upload"
        raise ConfigError(f"{what}, or name a repository with --push")
    if folder is None and not (directory / NODE_FILE).exists() and (directory / PROVENANCE_FILE).exists():
        return _push(directory, push, public, dry_run)
    _require_node(directory)
    with waiting("loading the packages"):
        hide_progress_bars()
    if folder is not None:
        _export(directory, folder, known, step)
        return _push(folder, push, public, dry_run) if push else None
    from swarm.trained.hub import export_to_hub

    with waiting(f"exporting the model of {directory}, and sending it" if not dry_run else f"exporting {directory}"):
        pushed = export_to_hub(directory, push, known, step, is_private=not public, is_dry=dry_run)
    _print_pushed(pushed, public)


def _push(folder: Path, repo: str, is_public: bool, is_dry: bool) -> None:
    from swarm.trained.hub import push_folder

    _print_pushed(push_folder(folder, repo, is_private=not is_public, is_dry=is_dry), is_public)


def _print_pushed(pushed: "Pushed", is_public: bool) -> None:
    for name, size in pushed.sizes_bytes.items():
        plain(f"{size / 1e6:9.3f} MB  {name}")
    whose = "public" if is_public else "private"
    total = f"{len(pushed.sizes_bytes)} files, {sum(pushed.sizes_bytes.values()) / 1e6:.1f} MB"
    sent = f"sent to {pushed.repo} ({whose}): {pushed.url}" if pushed.url else f"would go to {pushed.repo} ({whose})"
    plain(f"{total} {sent}")


def _export(directory: Path, folder: Path, kind: "Format", step: "WhichStep") -> None:
    from swarm.trained.export import export_model

    try:
        with waiting(f"loading the model of {directory}, and writing it to {folder}"):
            done = export_model(directory, folder, kind, step, time.time())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}; make room there or name another place") from None
    console.print(
        f"step {done.version.step} ({done.version.digest.hex()[:16]}) is in {done.folder}: {kind}, "
        f"{done.size_bytes / 1e6:.1f} MB",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for prefill in done.prefills:
        plain(
            f"note: it was trained with answers that begin with {prefill!r}; other tools have to begin them so (README)"
        )


def verify(folder: Annotated[Path, Argument(help="Folder that `swarm export` made.")]) -> None:
    """Check that every file of an exported model is as its node signed it, and show its origin."""
    from swarm.trained.provenance import verify_export

    with waiting(f"reading every file of {folder}"):
        found = verify_export(folder)
    for key, value in (
        ("signed by", found.node_id),
        ("files", f"{len(found.digests)}, all as signed"),
        ("model", f"step {found.step} of run {found.run_id}, from {found.base_model}"),
        ("recipe", found.recipe),
        ("version", found.version_digest),
        ("manifest", found.manifest_digest or "none: no run was joined by a link"),
    ):
        plain(f"{key:<10} {value}")


def chat(
    target: Target,
    message: Annotated[str, Option("--message", "-m", help="Ask this one question and end.")] = "",
    system: Annotated[str, Option(help="System message.")] = "",
    step: Step = None,
    temperature: Annotated[float, Option(min=0, max=10, help="0: always the likeliest token.")] = 0.7,
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 512,
    device: Device = "auto",
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D the conversation; /new begins a new one."""
    with waiting("loading the packages") as wait:
        from swarm.trained.chat import Conversation
        from swarm.trained.model import load_target

        hide_progress_bars()
        wait.now(f"loading the model of {target}")
        model = load_target(target, step)
    prefills = {each.prefill for each in model.config.environments} if model.config else set[str]()
    prefill = prefills.pop() if len(prefills) == 1 else ""  # as it was trained
    talk = Conversation(
        model, max_new_tokens=max_new_tokens, temperature=temperature, system=system, prefill=prefill, device=device
    )

    def show(piece: str) -> None:
        thinks.end()
        sys.stdout.write(printable(piece))
        sys.stdout.flush()

    def ask(text: str) -> None:
        nonlocal thinks
        with waiting("reading the conversation") as thinks:
            talk.ask(text, show)

    thinks: Waiting
    if message:
        ask(message)
        print()
        return
    of = f", step {model.version.step}" if model.version else ""
    console.print(f"{target}{of}. Ctrl-C ends an answer, Ctrl-D leaves, /new starts again.", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/new":
            talk.reset()
        elif text:
            try:
                ask(text)
            except KeyboardInterrupt:
                show(" [ended; forgotten]")
            except ConfigError as error:
                show(str(error))
            print()


def samples(
    directory: Annotated[Path, Argument(help="Directory of the node, running or not.")],
    count: Annotated[int, Option(min=1, help="Groups to show, newest first.")] = 2,
    each: Annotated[int, Option(min=1, help="Answers of a group to show.")] = 4,
    origin: Annotated[str, Option("--from", help="Groups to show: own, others, or all.")] = "all",
    env: Annotated[str, Option(help="Only groups of this environment.")] = "",
    tokens: Annotated[bool, Option("--tokens", help="Show each token with log-prob and step.")] = False,
    as_json: Annotated[bool, Option("--json", help="Machine-readable, everything of each group.")] = False,
    trust: Trust = False,
) -> None:
    """Read completions: questions, answers, and their rewards.

    Own groups were generated by this node, the others were admitted. Rewards are those of this node's verifier.
    """
    from swarm.trained.samples import SampleReader

    if origin not in ("own", "others", "all"):
        raise ConfigError(f"--from {origin}: expected own, others or all")
    with waiting(f"reading the groups of {directory}", is_quiet=as_json):
        groups = SampleReader(directory, trust).newest(count, origin, env)
    if as_json:
        typer.echo(json.dumps([asdict(group) for group in groups], indent=1))
        return
    if not groups:
        console.print("no such group is in the store yet")
    for group in groups:
        who = "made here" if group.is_made_here else f"of node {group.producer[:8]}"
        console.rule(f"{group.env}, task {group.task_id}, {who}, {group.digest[:8]}", align="left")
        for message in group.messages:
            plain(f"{message.role}: {message.content}")
        plain(f"reference: {group.reference}")
        for sample in group.samples[:each]:
            _print_sample(sample, tokens)
        left = len(group.samples) - each
        if left > 0:
            console.print(f"... {left} more answers (--each)", style="dim")


# --- shared ---------------------------------------------------------------------------------------


def _require_node(directory: Path) -> None:
    if not (directory / NODE_FILE).is_file():
        raise ConfigError(
            f"{directory}: no node.toml, so no node's directory; `swarm join` makes one in swarm-node, "
            "`swarm simulate --keep-checkpoints` keeps its nodes in <run>/swarm/<name>"
        )


def hide_progress_bars() -> None:
    """Hides the bars that transformers shows while it loads or saves a model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _print_sample(sample: "Sample", has_tokens: bool) -> None:
    parts = {name: value for name, value in sample.reward_parts.items() if name != "outcome"}
    parts_shown = "".join(f", {name} {value:.3g}" for name, value in parts.items())
    cut = ", cut off" if sample.finish == "length" else ""
    console.print(f"\n[reward {sample.reward:.3g}{parts_shown}{cut}]", style="bold", markup=False, highlight=False)
    if has_tokens:
        for token in sample.tokens:
            chosen = f"{token.logprob:7.2f}" if token.logprob is not None else "      -"
            plain(f"{chosen} nats  step {token.step:>4}  {token.text!r}")
        return
    for number, action in enumerate(sample.actions):
        plain(action)
        for message in sample.observations[number] if number < len(sample.observations) else ():
            plain(f"    {message.role}: {message.content}")


def plain(text: str) -> None:
    """Prints text of a model or a peer without markup and with control characters escaped."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
