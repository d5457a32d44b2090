"""Where Turnout keeps between runs what takes long to make: compiled kernels, measured tables, tactics.

1. `$XDG_CACHE_HOME/turnout`, by default `~/.cache/turnout`: the user's folder.
2. Where that cannot be written (a read-only container, a uid without a home), a private folder of this uid
   among the temporary files.
3. Nowhere: what is made lasts as long as the process.

Nothing else decides on a folder for a cache. Torch-free.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from turnout.errors import UserError

NOWHERE = Path("/nonexistent/turnout")  # holds nothing and takes nothing
SHARED_MEMORY = Path("/dev/shm")  # writable even in containers whose file system is not
REMEDY = "set XDG_CACHE_HOME to a folder that can be written and lasts"

log = logging.getLogger("turnout.cache")


def cache_folder() -> Path:
    """Where tables are looked for and kept. Writing there may still fail with OSError.

    The user's folder if it exists, for what it holds counts even where nothing can be added, or can be made.
    """
    user = user_folder()
    if user is not None and (user.is_dir() or _make(user)):
        return user
    return _temporary() or NOWHERE


def lasting_folder() -> Path:
    """The user's folder, for results that are worth nothing if they do not last.

    Raises UserError if it cannot be written.
    """
    user = user_folder()
    if user is None:
        raise UserError(f"there is no home folder to keep results in; {REMEDY}")
    if not _make(user):
        raise UserError(f"{user}: cannot be written; {REMEDY}")
    return user


def writable_folder() -> Path | None:
    """Where files can be added now; None if nowhere. Says once per process where it has to make do."""
    user = user_folder()
    if user is not None and _make(user):
        return user
    folder = _temporary()
    _say_once(str(user or "~/.cache"), folder)
    return folder


def user_folder() -> Path | None:
    """Where the user wants caches, writable or not; None for a uid without a home."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "turnout"
    home = _home()
    return home and home / ".cache" / "turnout"


def private_folder(purpose: str) -> Path:
    """A new folder that only this user can enter; the caller removes it.

    purpose: what it is for, as the error says it. Raises UserError if there is no room for it.
    """
    place_temporary_files()
    try:
        return Path(tempfile.mkdtemp(prefix="turnout-"))
    except OSError as error:
        raise UserError(
            f"there is no folder for {purpose}: temporary files cannot be written "
            f"({error.strerror or error}); set TMPDIR to a folder that can, or mount a tmpfs on /tmp"
        ) from None


def place_temporary_files() -> Path:
    """The folder of temporary files: the system's, or shared memory where that cannot be written, or NOWHERE.

    To be called before torch is imported, which asks the system and fails where there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            os.environ["TMPDIR"] = str(SHARED_MEMORY)  # for the processes that this one starts
            tempfile.tempdir = str(SHARED_MEMORY)
        else:
            tempfile.tempdir = str(NOWHERE)
    return Path(tempfile.tempdir)


def redirect_compilers() -> None:
    """Let Triton and FlashInfer, which keep kernels at home, keep them here where home cannot be written.

    Sets their environment variables unless they are set, before they are imported.
    """
    home = _home()
    if home is not None and _can_add(home / ".triton") and _can_add(home / ".cache"):
        return
    folder = writable_folder()
    if folder is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder))


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry in passwd
        return None


def require_current_folder() -> None:
    """Raises UserError where the current folder is gone: torch's libraries cannot be loaded then, and say
    something else."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder was removed; change to one that exists") from None


def _make(folder: Path) -> bool:
    """Whether files can be added to `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _can_add(folder: Path) -> bool:
    """Whether `folder` can be written, or be made; does not make it."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(there, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """This uid's folder among the temporary files; None if they cannot be written or it is another's.

    Compiled code is run from there, so no other user may have put anything in.
    """
    folder = place_temporary_files() / f"turnout-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if private and _make(folder) else None


@functools.cache
def _say_once(wanted: str, folder: Path | None) -> None:
    if folder is None:
        log.warning("neither %s nor any temporary folder can be written: kernels are compiled again", wanted)
    else:
        log.warning("%s cannot be written: compiled kernels are kept in %s; %s", wanted, folder, REMEDY)
