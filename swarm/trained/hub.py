"""Upload of an export to a hub: a new repository with the files that the node signed, all of them and nothing else.

Invariant: every file is checked against its signed provenance before anything is sent; a repository is private by
default, and an existing repository is not written to.
"""

import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swarm.errors import ConfigError, Unavailable
from swarm.trained.export import export_model
from swarm.trained.formats import Format
from swarm.trained.model import WhichStep
from swarm.trained.provenance import PROVENANCE, verify_export

_NO_TOKEN: Final = "make a token with write access there, then `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """An upload, or the dry run of one."""

    repo: str  # OWNER/NAME; of a dry run as it was asked for
    url: str  # of the commit; empty for a dry run
    sizes_bytes: dict[str, int]  # path of each file in the repository -> size


def push_folder(folder: Path, repo: str, *, is_private: bool = True, is_dry: bool = False) -> Pushed:
    """Uploads an export as a new repository (blocking, slow).

    Args:
        folder: an export.
        repo: OWNER/NAME, or NAME for the owner of the token.
        is_private: makes the repository visible to its owner alone.
        is_dry: only lists the files that would be sent; sends no request.

    Raises:
        ConfigError: a file is not as it was signed, the name is not valid, the repository exists, or the hub refuses
            the token.
        Unavailable: the hub does not answer, or answers with another error.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    statement = verify_export(folder).statement
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push {repo}: {error}") from None
    names = [*statement["files"], PROVENANCE]
    sizes = {name: (folder / name).stat().st_size for name in names}
    if is_dry:
        return Pushed(repo=repo, url="", sizes_bytes=sizes)
    api: Any = HfApi()
    with _errors_explained(repo, constants.ENDPOINT):
        whole = str(api.create_repo(repo, private=is_private).repo_id)
        message = f"Step {statement['step']} of run {statement['run_id']}, by swarm-trainer"
        try:
            done = api.upload_folder(repo_id=whole, folder_path=folder, allow_patterns=names, commit_message=message)
        except BaseException:
            with suppress(Exception):  # it was made a moment ago, holds nothing, and would be in the next try's way
                api.delete_repo(whole)
            raise
    return Pushed(repo=whole, url=str(done.commit_url), sizes_bytes=sizes)


def export_to_hub(
    directory: Path, repo: str, kind: Format, step: WhichStep, *, is_private: bool = True, is_dry: bool = False
) -> Pushed:
    """Exports the model of a node's checkpoint and uploads it, without keeping a folder.

    Arguments and errors are those of `export_model` and `push_folder`.
    """
    scratch = Path(tempfile.mkdtemp(prefix="swarm-push-"))
    try:
        folder = export_model(directory, scratch / "model", kind, step, time.time()).folder
        return push_folder(folder, repo, is_private=is_private, is_dry=is_dry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _errors_explained(repo: str, endpoint: str) -> Generator[None]:
    """Turns errors of the hub into ConfigError or Unavailable, with the fix."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except LocalTokenNotFoundError:
        raise ConfigError(f"--push {repo}: no token for {endpoint}: {_NO_TOKEN}") from None
    except OfflineModeIsEnabled:
        raise ConfigError(f"--push {repo}: HF_HUB_OFFLINE is set: unset it") from None
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code == 409:
            raise ConfigError(
                f"--push {repo}: exists on {endpoint}: name another, or delete that one there; nothing was sent"
            ) from None
        if code in (401, 403):
            what = "this token may not write there" if code == 403 else "no token, or one that does not count any more"
            raise ConfigError(f"--push {repo}: {endpoint} says {code}, {what}: {_NO_TOKEN}") from None
        words = error.server_message or str(error).splitlines()[0]
        raise Unavailable(f"--push {repo}: {endpoint} says {code}: {words}; try again later") from None
    except RuntimeError as error:  # one of the large files
        reason = " ".join(str(error.__cause__ or "").split())
        raise Unavailable(f"--push {repo}: {error} {reason}; try again later") from None
    except (HTTPError, ConnectionError) as error:
        raise Unavailable(
            f"--push {repo}: {endpoint} does not answer ({type(error).__name__}): is there a network? HF_ENDPOINT "
            "names another hub"
        ) from None
