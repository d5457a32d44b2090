"""What is handed out: the wheel, and the steps of the images, run as the Dockerfile runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.server.processes import eventually, free_port
from turnout.kernels.cpu import jit

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MB = 1e6


def test_both_images_run_as_nobody_in_particular_and_say_how_they_are():
    stages = re.split(r"^FROM .* AS ", DOCKERFILE, flags=re.M)[1:]
    assert [stage.split()[0] for stage in stages] == ["cpu", "cuda"]
    for stage in stages:
        name = stage.split()[0]
        assert f"RUN /src/docker/install.sh {name} /opt/turnout" in stage
        steps = re.findall(r"^([A-Z]+) ", stage, flags=re.M)
        assert steps.index("USER") < steps.index("ENTRYPOINT")
        assert "USER turnout" in stage
        assert "HEALTHCHECK" in steps


def test_workflows_call_what_exists():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "bash .ci/run" in workflow
    assert (ROOT / ".ci/run").exists()
    for target in re.findall(r"target: \[(.*)\]", workflow):
        assert f" AS {target}\n" in DOCKERFILE


def test_the_citation_names_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("version")
    if version is None:  # written once, in the package
        from turnout import __version__ as version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("arguments", [("tpu", "x"), ("cpu", "/tmp"), ()])
def test_wrong_arguments_of_the_install_script_change_nothing(arguments: tuple[str, ...], tmp_path: Path):
    done = subprocess.run(
        [ROOT / "docker/install.sh", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, where no earlier build has left files that are shipped again."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "turnout", source / "turnout", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", source, source]
    subprocess.run(command, check=True, timeout=280)
    [built] = source.glob("*.whl")
    return built


@pytest.mark.more
def test_the_wheel_is_small_and_holds_the_package_whole(wheel: Path):
    assert wheel.stat().st_size < 12 * MB
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (file for file in (ROOT / "turnout").rglob("*") if file.is_file())
    assert names == {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}


@pytest.mark.more
def test_what_the_wheel_installs_plans_and_answers_from_another_folder(wheel: Path, tmp_path: Path):
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", installed, wheel]
    subprocess.run(pip, check=True, timeout=280)
    if jit.FOLDER is not None:  # compiled kernels, as an image has them
        compiled = installed / "turnout/kernels/cpu/__pycache__" / jit.FOLDER.name
        shutil.copytree(jit.FOLDER, compiled, dirs_exist_ok=True)

    def run(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=280
        ).stdout

    assert run("-c", "import turnout; print(turnout.__file__)").startswith(str(installed))
    planned = json.loads(run("-m", "turnout", "plan", "demo", "--device", "cpu", "--json"))
    assert not planned["refused"]
    question = ("generate", "demo", "What is 12*34?", "--max-tokens", "64", "--device", "cpu")
    assert "408" in run("-m", "turnout", *question)
    task = "from turnout.evals.tasks import load_task; print(len(load_task('wordmath', 2, 0)))"
    assert run("-c", task) == "2\n"


@pytest.mark.more
@pytest.mark.timeout(900)
def test_the_cpu_image_installs_and_serves(tmp_path: Path):
    """The steps of target cpu in a clean virtual environment, then the container's command and its probe."""
    prefix = tmp_path / "turnout"
    clean = {
        key: os.environ[key]
        for key in ("HOME", "LANG", "PIP_CONFIG_FILE", "PIP_INDEX_URL")
        if key in os.environ
    }
    base = str(Path(sys.base_prefix) / "bin")
    clean["PATH"] = f"{base}:/usr/local/bin:/usr/bin:/bin"
    clean["PIP_NO_COMPILE"] = "0"  # pip takes it for the flag: Python compiles what it imports
    subprocess.run(
        [ROOT / "docker/install.sh", "cpu", prefix], env=clean, cwd=tmp_path, check=True, timeout=800
    )
    probe = [prefix / "bin/python", ROOT / "docker/healthcheck.py"]
    clean |= {
        "PATH": f"{prefix}/bin:{clean['PATH']}",
        "TURNOUT_PORT": str(free_port()),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    assert subprocess.run(probe, env=clean, capture_output=True, check=False).returncode == 1
    server = subprocess.Popen([prefix / "bin/turnout", "serve", "demo"], env=clean, cwd=tmp_path)
    try:

        def serves() -> bool:
            assert server.poll() is None
            return subprocess.run(probe, env=clean, capture_output=True, check=False).returncode == 0

        assert eventually(serves, 120)
    finally:
        server.terminate()
        assert server.wait(60) == 0
