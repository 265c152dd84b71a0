"""What errors say: causes outside of the node that every program meets, known by the words of the system.

Invariant: only the words of Python and of the operating system are looked for, in errors of every part alike.
"""

import re
from dataclasses import dataclass
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.snapshot import Snapshot, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownError:
    """A cause, and the words by which it is known."""

    name: str
    words: str  # a regular expression
    claim: str
    fix: str


NEWEST: Final = 20
EFFECTS: Final = frozenset(
    {
        "ended_with_error",
        "never_ran",
        "restarts_often",
        "worker_dies",
        "loops_fail",
        "cannot_be_scored",
        "versions_refused",
        "not_published",
        "status_unwritten",
        "logged_errors",
    }
)
KNOWN: Final = (
    KnownError(
        name="port_taken",
        words=r"address already in use|failed to bind|errno 98\b|cannot bind|could not bind",
        claim="another process holds a port that this node is to listen on",
        fix="end the other one (ss -ltnp names it), or change the port in node.toml: exchange.listen, "
        "directory.listen, telemetry.metrics_listen or serve.listen",
    ),
    KnownError(
        name="no_permission",
        words=r"permission denied|permissionerror|read-?only (file system|database)|not permitted|errno (13|30)\b",
        claim="this user may not write, or read, a file that the node needs",
        fix="who owns it: ls -la; then chown -R it to the user that runs the node, or mount the disk for writing",
    ),
    KnownError(
        name="file_gone",
        words=r"no such file or directory|filenotfounderror|errno 2\b",
        claim="a file or directory that the configuration names is not there",
        fix="put it back, or name the one that is meant in node.toml",
    ),
    KnownError(
        name="package_missing",
        words=r"no module named|modulenotfounderror|importerror",
        claim="a Python package that this configuration needs is not installed",
        fix="install it where the node runs (swarm doctor says which), or choose what needs none",
    ),
    KnownError(
        name="database_locked",
        words=r"database (table )?is locked",
        claim="another process keeps a database of this node locked",
        fix="fuser groups.sqlite, in the directory of the node, names it: a viewer of SQLite files, a backup or a "
        "synchronised folder; end it or keep it away from this directory, then start the node again",
    ),
    KnownError(
        name="too_many_files",
        words=r"too many open files|errno 24\b",
        claim="the node may not open so many files at once",
        fix="ulimit -n 65536 before the start (LimitNOFILE= of its service)",
    ),
    KnownError(
        name="too_many_processes",
        words=r"can't start new thread|resource temporarily unavailable|blockingioerror|errno 11\b",
        claim="the node may not start so many processes and threads",
        fix="ulimit -u 4096 before the start (LimitNPROC= and TasksMax= of its service, pids of its container)",
    ),
    KnownError(
        name="disk_fails",
        words=r"input/output error|errno 5\b|stale file handle|errno 116\b|transport endpoint|errno 107\b",
        claim="the disk, or the network that it is reached by, does not read or write what it should",
        fix="dmesg and smartctl say what is wrong with it; a directory of a node belongs on a local disk",
    ),
    KnownError(
        name="file_damaged",
        words=r"is not json|is not a json object|unicodedecodeerror|codec can't decode|jsondecodeerror|safetensorerror"
        r"|header too (large|small)|disk image is malformed|file is not a database|unexpected end of (data|file)",
        claim="a file that the node reads is damaged, cut off or of another kind",
        fix="put back a whole one: questions are JSON lines in UTF-8, weights are whole safetensors files",
    ),
    KnownError(
        name="model_not_found",
        words=r"localentrynotfound|repositorynotfound|gatedrepo|offline mode|couldn't connect to|huggingface\.co"
        r"|is not a local folder|incorrect_path_or_model_id",
        claim="the model cannot be had: it is not on this machine, and the hub does not give it",
        fix="model.source as a folder that is there, or a hub id, with network and, for some, a token (hf auth login)",
    ),
    KnownError(
        name="nobody_answers",
        words=r"connection refused|name or service not known|name resolution|network is unreachable|no route to host"
        r"|errno (101|111|113)\b",
        claim="a server that this node needs does not answer",
        fix="is it running, is its address right, and is the network there?",
    ),
    KnownError(
        name="device_fails",
        words=r"\bcuda\b|\bcudnn\b|\bnccl\b|no kernel image|nvidia",
        claim="the GPU, or its driver, does not do what is asked of it",
        fix='nvidia-smi and swarm gpu-check say what is there; device = "cpu" does without',
    ),
)


def suspects(snapshot: Snapshot) -> list[Suspect]:
    """Causes whose words the newest errors have, one of each."""
    logged = [each.fields for each in snapshot.logged if each.is_error]
    errors = [*(line for line in snapshot.log.splitlines() if "Error" in line), *logged, *snapshot.errors][-NEWEST:]
    found: list[Suspect] = []
    for known in KNOWN:
        of = [error for error in errors if re.search(known.words, error, re.IGNORECASE)]
        if of:
            finding = Diagnosed(
                name=known.name,
                claim=f"{known.claim}: {shortened(of[-1])}",
                evidence=(f"{len(of)} of the newest {len(errors)} errors (events.jsonl, warnings.jsonl, log.txt)",),
                fix=known.fix,
                gravity=Gravity.NOTE,
                certainty=Certainty.LIKELY,
            )
            found.append(Suspect(finding=finding, explains=EFFECTS))
    return found
