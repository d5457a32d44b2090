"""Where caches go, and that everything runs where neither the package nor a home can be written.

The package runs from a copy that another user owns, as in a container: as root, these tests start it as
`nobody` and as a uid that no file knows; as somebody else, from a copy without permission to write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import httpx
import pytest

import turnout
from turnout import cache
from turnout.errors import UserError
from turnout.server.launch import READY

PACKAGE = Path(turnout.__file__).parent
NOBODY, UNKNOWN = 65534, 54321
ROOT = os.geteuid() == 0
GENERATE = ("generate", "demo", "What is 12*34?", "--max-tokens", "4", "--device", "cpu")
KERNELS = "turnout/kernels/cpu/__pycache__/kernels-*"
MISSING = "rows._norm-*"  # what is compiled soonest


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_for_all() as folder:
        yield folder


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """The package, compiled in another place, where it cannot be written; its parent folder."""
    with folder_for_all() as folder:
        yield image_in(folder)


def image_in(place: Path) -> Path:
    copy = place / "image" / "turnout"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("kernels-*"))
    shutil.copytree(compiled(), copy / compiled().relative_to(PACKAGE))
    subprocess.run(["chmod", "-R", "a=rX", str(copy)], check=True)
    return copy.parent


@cache_results
def compiled() -> Path:
    """The folder of all kernels."""
    compile_and_tell = "from turnout.kernels.cpu import __main__, jit; print(jit.FOLDER)"
    done = subprocess.run([sys.executable, "-c", compile_and_tell], stdout=subprocess.PIPE, check=True)
    return Path(done.stdout.decode().strip())


@cache_results
def become(uid: int) -> tuple[str, ...]:
    """The command that runs another as `uid`, which may write nothing of ours but must read the interpreter.

    It may lie in a home that others cannot enter; then with the one capability to read everything, or, where
    that is not ours to give, as root without any capability, who cannot write what has no permission for it.
    """
    if not ROOT:
        return ()
    user = ("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups")
    reads = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    powerless = ("setpriv", "--inh-caps", "-all", "--bounding-set", "-all")
    start_another = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    for command in (user, user + reads, powerless):
        tried = [*command, sys.executable, "-c", start_another]
        if subprocess.run(tried, stderr=subprocess.DEVNULL).returncode == 0:
            return command
    raise AssertionError("no other user can be taken on")


class Container:
    """Runs commands of `image` as `uid`, with temporary files in a folder of its own."""

    def __init__(self, image: Path, uid: int, place: Path, **variables: str):
        temporary = place / "tmp"
        temporary.mkdir()
        if ROOT:
            os.chown(temporary, uid, uid)
            temporary.chmod(0o777)
        kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
        self._become = become(uid)
        self.cache = temporary / f"turnout-{uid if '--reuid' in self._become else os.geteuid()}"
        self._options: dict[str, Any] = {
            "env": kept | {"PYTHONPATH": str(image), "TMPDIR": str(temporary)} | variables,
            "cwd": image,
            "text": True,
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        command = [*self._become, sys.executable, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, **self._options | options)

    def run(self, *words: str, **options: Any) -> tuple[int, str, str]:
        process = self.start(*words, stderr=subprocess.PIPE, **options)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def answer() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "turnout", *GENERATE], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.more
@pytest.mark.parametrize("runner", ["auto", "torch"])
def test_generate_as_nobody(image, place, answer, runner):
    """What was compiled before is used, from a folder that can be added to, and one line says so."""
    container = Container(image, NOBODY, place, HOME="/nonexistent")
    code, out, err = container.run("-m", "turnout", *GENERATE, "--moe-runner-backend", runner)
    assert (code, out) == (0, answer), err
    [line] = err.splitlines()
    assert line.startswith("/nonexistent/.cache/turnout cannot be written")
    assert str(container.cache) in line
    [before], [after] = image.glob(KERNELS), container.cache.glob("kernels-*")
    assert after.name == before.name
    assert content(after) == content(before)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_serve_as_a_uid_that_no_file_knows(image, place):
    server = Container(image, UNKNOWN, place).start(
        *("-m", "turnout", "serve", "demo", "--port", "0", "--device", "cpu")
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith(READY))
        url = f"{line.removeprefix(READY).strip()}/completions"
        reply = httpx.post(url, json={"prompt": "Tom has 3", "max_tokens": 3}, timeout=60)
        assert reply.status_code == 200, reply.text
    finally:
        server.terminate()
        assert server.wait(60) == 0


def main(prepare: str) -> tuple[str, str]:
    """The entry point with GENERATE, after `prepare`."""
    return "-c", f"import sys\n{prepare}\nfrom turnout.cli import main\nsys.argv[1:] = {GENERATE}\nmain()"


@pytest.mark.more
def test_a_full_disk(image, place, answer):
    """Folders can be made and files not, so kernels are read where they were compiled."""
    full = (
        "import resource, tempfile; tempfile.gettempdir(); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    )
    code, out, err = Container(image, UNKNOWN, place).run(*main(full))
    assert (code, out) == (0, answer), err
    assert len(err.splitlines()) == 1


@pytest.mark.more
def test_nowhere_to_write_at_all(place, answer):
    """Compiled kernels are read in place; what is missing is compiled, and lost with the process."""
    image = image_in(place)
    [kernels] = image.glob(KERNELS)
    kernels.chmod(0o755)
    for file in kernels.glob(MISSING):
        file.unlink()
    kernels.chmod(0o555)
    nowhere = (
        "import pathlib, tempfile; tempfile._candidate_tempdir_list = lambda: []\n"
        "from turnout import cache; cache.SHARED_MEMORY = pathlib.Path('/proc/nowhere')"
    )
    code, out, err = Container(image, UNKNOWN, place).run(*main(nowhere))
    assert (code, out) == (0, answer), err
    [line] = err.splitlines()
    assert "nor any temporary folder can be written" in line
    assert not list(kernels.glob(MISSING))


# The rule


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def spare(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is used where the one asked for cannot be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    return home / "tmp" / f"turnout-{os.getuid()}"


def test_the_user_says_where(home, monkeypatch):
    assert cache.cache_folder() == cache.writable_folder() == home / ".cache" / "turnout"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert cache.cache_folder() == cache.lasting_folder() == home / "elsewhere" / "turnout"


def test_what_cannot_be_written_gives_way(spare, caplog):
    cache._say_once.cache_clear()
    assert cache.cache_folder() == cache.writable_folder() == cache.writable_folder() == spare
    assert spare.stat().st_mode & 0o777 == 0o700
    assert [r.message.split(":")[0] for r in caplog.records] == ["/proc/nowhere/turnout cannot be written"]
    with pytest.raises(UserError, match=r"/proc/nowhere/turnout: cannot be written; set XDG_CACHE_HOME"):
        cache.lasting_folder()


def test_a_folder_that_others_could_fill_is_not_used(spare):
    spare.mkdir()
    spare.chmod(0o777)
    assert cache.writable_folder() is None
    assert cache.cache_folder() == cache.NOWHERE
    spare.rmdir()
    spare.symlink_to(spare.parent)
    assert cache.writable_folder() is None


def test_compilers_follow_where_home_cannot_be_written(home, spare, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, "so that it is put back")
        monkeypatch.delenv(name)
    cache.redirect_compilers()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setattr(cache, "_can_add", lambda folder: not folder.is_relative_to(home))
    cache.redirect_compilers()
    assert os.environ["TRITON_CACHE_DIR"] == str(spare / "triton")
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(spare)


def test_no_temporary_files(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", None)  # so that what is set there meanwhile goes again
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(cache, "SHARED_MEMORY", Path("/proc/nowhere"))
    with pytest.raises(UserError, match=r"no folder for sockets: .*set TMPDIR"):
        cache.private_folder("sockets")
