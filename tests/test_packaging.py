"""What is handed out: the wheel, and the steps of the images, run as the Dockerfile runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.more
def test_the_wheel_is_small_and_holds_what_is_needed(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, ROOT]
    subprocess.run(command, check=True, timeout=280)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 12 * MB
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"turnout/assets/demo/model.safetensors", "turnout/py.typed"} <= names
    assert not any(name.startswith(("tests/", "tools/")) for name in names)


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
    subprocess.run(
        [ROOT / "docker/install.sh", "cpu", prefix], env=clean, cwd=tmp_path, check=True, timeout=800
    )
    probe = [prefix / "bin/python", ROOT / "docker/healthcheck.py"]
    clean |= {
        "PATH": f"{prefix}/bin:{clean['PATH']}",
        "TURNOUT_PORT": "31987",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    assert subprocess.run(probe, env=clean, capture_output=True, check=False).returncode == 1
    server = subprocess.Popen([prefix / "bin/turnout", "serve", "demo"], env=clean, cwd=tmp_path)
    try:
        for _ in range(120):
            if subprocess.run(probe, env=clean, capture_output=True, check=False).returncode == 0:
                break
            assert server.poll() is None
        else:
            pytest.fail("not ready")
    finally:
        server.terminate()
        assert server.wait(60) == 0
