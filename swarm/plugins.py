"""Loading of extras and plug-ins: "module:name", "path/my_file.py:name", or an installed entry point.

Invariant: the name comes from this node's own configuration, or from a manifest together with the digest of an
installed package. A file is loaded under a private module name, so that it neither replaces nor shadows a module.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from swarm.errors import ConfigError

EXTRAS: Final[Mapping[str, str]] = {
    "apps": "swarm.extras.environments.apps:AppsEnvironment",
    "code": "swarm.extras.environments.code:CodeEnvironment",
    "dialogue": "swarm.extras.environments.dialogue:DialogueEnvironment",
    "nim": "swarm.extras.environments.nim:NimEnvironment",
    "notes": "swarm.extras.environments.notes:NotesEnvironment",
    "python": "swarm.extras.environments.python_programs:PythonEnvironment",
    "plan": "swarm.extras.plan.plan_run:run_plan",
    "tinker": "swarm.extras.tinker.serve_tinker:serve_tinker",
}
"""Parts of `swarm.extras` that the rest of the package may load: kinds of environments, and commands."""
_INSTALLERS_RECORDS: Final = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_PRIVATE_PREFIX = "_swarm_plugin_"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def load_extra(name: str) -> Callable[..., Any]:
    """Imports and returns an entry of EXTRAS by its key. Raises as `load_own`."""
    return load_own(EXTRAS[name])


def load_own(spec: str) -> Callable[..., Any]:
    """Imports and returns a class or function of this package by "module:name"; errors of the import propagate."""
    # load_object would turn an error of ours into a ConfigError, which blames the user's configuration
    module, _, attribute = spec.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), attribute))


def load_object(spec: str) -> object:
    """Loads and returns the object that `spec` names.

    Args:
        spec: "package.module:name" (an importable module), "path/file.py:name" (a file; relative paths start
            at the working directory), or "file:name" if that directory has file.py and no module is named
            `file`. `name` may be dotted.

    Raises:
        ConfigError: the spec is malformed, its module or file is missing or fails, or it has no `name`.

    Example:
        score = load_object("my_pkg.my_file:score")
    """
    where, name = _split(spec)
    module = _load(spec, where)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:20]) or "nothing public"
            raise ConfigError(f"{spec!r}: {where} has no {name!r}; it has {known}")
        found = getattr(found, part)
    return found


def is_relative(spec: str) -> bool:
    """True if `load_object` would look for a file of this spec in the working directory."""
    where = spec.rpartition(":")[0]
    if where.endswith(".py"):
        return not Path(where).expanduser().is_absolute()
    return where.isidentifier() and importlib.util.find_spec(where) is None


def load_entry_point(group: str, name: str) -> object:
    """Loads and returns an entry point of an installed package. Raises ConfigError if it is unknown or fails."""
    offered = importlib.metadata.entry_points(group=group)
    if name not in offered.names:
        known = ", ".join(sorted(offered.names)) or "none"
        fix = "install its package, or write package.module:name or path/file.py:name"
        raise ConfigError(f"{name!r}: no entry point of the group {group} (installed: {known}); {fix}")
    try:
        return offered[name].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name!r}: loading {offered[name].value} failed: {_reason(error)}") from error


def package_digest(group: str, name: str) -> tuple[str, str]:
    """The installed package of an entry point: "name version", and the SHA-256 over all its files as hex.

    Files that an installer writes (compiled files, scripts, records) do not count. The folders of the package may hold
    no other file than those that its wheel lists, so that equal digests mean equal code.

    Raises:
        ConfigError: there is no such entry point; or its package has no list of files, as after an editable install; or
            it has code that its list of sources does not show.
    """
    offered = importlib.metadata.entry_points(group=group, name=name)
    package = next(iter(offered)).dist if offered else None
    if package is None:
        raise ConfigError(f"{name!r}: no entry point of the group {group}; install its package")
    listed = package.files or []
    files = [file for file in listed if not _is_written_by_installer(file)]
    code = [file for file in files if not file.parts[0].endswith(".dist-info")]
    if not code or any(file.suffix == ".pth" for file in listed):
        raise ConfigError(f"{package.name}: installed without a list of its files; install a wheel of it, not -e")
    if hidden := _first_hidden(package, listed, code):
        raise ConfigError(f"{package.name}: {hidden} is code that its sources do not show; install a plain wheel of it")
    whole = hashlib.sha256()
    for file in sorted(files, key=str):
        content = Path(str(package.locate_file(file))).read_bytes()
        whole.update(f"{file}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return f"{package.name} {package.version}", whole.hexdigest()


def _is_written_by_installer(file: importlib.metadata.PackagePath) -> bool:
    is_record = file.parts[0].endswith(".dist-info") and file.name in _INSTALLERS_RECORDS
    is_script = file.parts[0] == ".." and len(file.parts) > 1 and file.parts[-2] in ("bin", "Scripts")
    return is_record or is_script or (file.suffix == ".pyc" and file.parent.name == "__pycache__")


def _first_hidden(
    package: importlib.metadata.Distribution,
    listed: Sequence[importlib.metadata.PackagePath],
    code: Sequence[importlib.metadata.PackagePath],
) -> str:
    """Name of the first file in the package's folders that its list of sources does not cover; "" if there is none."""
    for file in listed:  # an installer lists its own compiled files without a hash
        if file.suffix == ".pyc" and (file.parent.name != "__pycache__" or file.hash is not None):
            return str(file)
    known = {Path(str(package.locate_file(file))) for file in code}
    if outside := [file for file in code if file.parts[0] == ".."]:
        return str(outside[0])
    top = Path(str(package.locate_file("")))
    for folder in sorted({path.parent for path in known}):
        inside = [path for path in folder.iterdir() if path.name != "__pycache__"] if folder != top else []
        for path in sorted(inside):
            if path not in known and not any(path in each.parents for each in known):
                return str(path.relative_to(top))
        for path in sorted((folder / "__pycache__").glob("*.pyc")):
            has_source = folder / f"{path.name.partition('.')[0]}.py" in known
            if _ignores_its_source(path) if has_source else folder != top:
                return str(path.relative_to(top))
    return ""


def _ignores_its_source(compiled: Path) -> bool:
    """True if Python runs a compiled file without checking its source (PEP 552: flags 0b01)."""
    flags = int.from_bytes(compiled.read_bytes()[4:8], "little")
    return flags & 0b11 == 0b01


def module_of(spec: str) -> str:
    """Loads the module of a spec and returns its name in `sys.modules`. Raises ConfigError as `load_object`."""
    return _load(spec, _split(spec)[0]).__name__


def code_version(defined: Callable[..., object]) -> str:
    """Digest, 16 hex digits, of a class or function's file, the releases of its imports, and Python's minor version.

    Equal code with other releases of its packages may behave differently, so it is another version. The package of the
    file itself counts if the file imports from it. Returns "builtin" if the source cannot be read.
    """
    try:
        source = Path(inspect.getfile(cast("Any", defined))).read_bytes()
        imported = _imported(source, defined.__module__.partition(".")[0])
    except (TypeError, OSError, SyntaxError, ValueError):
        return "builtin"
    parts = [hashlib.sha256(source).hexdigest(), PYTHON]
    for name in sorted(imported - sys.stdlib_module_names - {"swarm"}):
        parts += _releases(name)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _releases(module: str) -> list[str]:
    """Entries "package=version" of the packages that provide a module (PyYAML for yaml); empty if no package does."""
    try:
        return [f"{module}={importlib.metadata.version(module)}"]
    except importlib.metadata.PackageNotFoundError:
        packages = set(importlib.metadata.packages_distributions().get(module, ()))
        return [f"{package}={importlib.metadata.version(package)}" for package in sorted(packages)]


def _imported(source: bytes, own: str) -> set[str]:
    """Top-level names of the modules that a source imports anywhere; `own` stands for relative imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(own if node.level else (node.module or "").partition(".")[0])
    return names


def _split(spec: str) -> tuple[str, str]:
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name:
        raise ConfigError(f"{spec!r}: expected package.module:name or path/file.py:name")
    return where, name


def _load(spec: str, where: str) -> ModuleType:
    if where.endswith(".py"):
        return _load_file(spec, Path(where))
    beside = Path(f"{where}.py")
    if is_relative(spec) and beside.is_file():
        return _load_file(spec, beside)
    return _load_module(spec, where)


def _load_module(spec: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        fix = f"install the package that holds {error.name!r} (PYTHONPATH does not count), or give a path ending in .py"
        raise ConfigError(f"{spec!r}: no module {error.name!r}; {fix}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{spec!r}: importing {where} failed: {_reason(error)}") from error


def _load_file(spec: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    private_name = _PRIVATE_PREFIX + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    if private_name in sys.modules:
        return sys.modules[private_name]
    if not path.is_file():
        raise ConfigError(f"{spec!r}: no file {path}; give its path from the working directory or an absolute one")
    module_spec = importlib.util.spec_from_file_location(private_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[private_name] = module  # dataclasses of the file look their module up while it is executed
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[private_name]
        fix = ""
        if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name}.py").exists():
            fix = f"; files beside {path.name} are not imported: write it all in one file, or install a package"
        raise ConfigError(f"{spec!r}: executing {path} failed: {_reason(error)}{fix}") from error
    return module


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # argparse, or a script without a main guard
        return f"it ends the program (exit code {error.code}); put what runs under if __name__ == '__main__'"
    return f"{type(error).__name__}: {error}"
