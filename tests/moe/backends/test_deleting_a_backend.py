"""A backend is a folder and a line in the registry: without them, everything else works as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.kernels.cpu import jit

ROOT = Path(__file__).parents[3]

# A small layer, planned and computed in a copy of the package, against the oracle; and a name of none.
LAYER = """
import sys
import torch
import turnout.moe
from turnout.errors import PlanRefused
from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights
from turnout.moe import MoELayer, plan
from turnout.moe.accuracy import relative_error
from turnout.moe.budget import Budget
from turnout.moe.plan import PlanRequest
from turnout.moe.reference import experts_reference
from turnout.moe.routing import route
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import detect, named
from turnout.parallel.topology import Topology

field, gone, *names = sys.argv[1:]
assert turnout.__file__.startswith(sys.path[0] or "."), turnout.__file__
spec = MoESpec(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
place = dict(
    topology=Topology(),
    budget=Budget.from_limits(chunked_prefill_size=64, max_prefill_tokens=64, max_running_requests=8),
    compute_dtype="float32",
)
torch.manual_seed(0)
w13, w2 = encode(torch.randn(8, 64, 64) / 8, "bf16"), encode(torch.randn(8, 64, 32) / 6, "bf16")
experts = ExpertWeights(w13=w13, w2=w2, num_experts=8)
router, x = torch.randn(8, 64) / 8, torch.randn(20, 64)
chosen = plan(spec, hardware=detect("cpu"), **place)
ids, weights = route(x @ router.T, spec.routing, spec.top_k)
wanted = experts_reference(x, ids, weights, experts, spec.activation)
assert relative_error(MoELayer(spec, chosen, router_weight=router, experts=experts)(x), wanted) < 1e-5
assert not any(gone in module for module in sys.modules), "the folder was to be deleted"
for name in names:
    said = []
    for asked in (name, "no such backend"):
        try:
            plan(spec, hardware=named("h200"), **place, request=PlanRequest(**{field: asked}))
        except PlanRefused as error:
            [refusal] = [r for r in error.refusals if r.who == "plan"]
            said.append(refusal.limit)
    assert len(said) == 2 and said[0] == said[1] and said[0].startswith("unknown"), said
print(chosen.decode.runner, chosen.decode.dispatcher)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, without compiled files but the kernels of CPUs, as an image has it."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "turnout", root / "turnout", ignore=shutil.ignore_patterns("__pycache__"))
    if jit.FOLDER is not None:
        shutil.copytree(jit.FOLDER, root / "turnout/kernels/cpu/__pycache__" / jit.FOLDER.name)
    return root


def without(package: Path, folder: Path, backend: str, of: str = "moe") -> Path:
    """`package`, in `folder`, less a backend's folder and its line in the registry."""
    copy = shutil.copytree(package, folder / "without")
    shutil.rmtree(copy / "turnout" / of / "backends" / backend)
    registry = copy / "turnout" / "registry.py"
    line = rf'^ *"\S+": "turnout\.{of}\.backends\.{backend}\..*\n'
    lines, removed = re.subn(line, "", registry.read_text(), flags=re.MULTILINE)
    assert removed == 1, "a backend is one line of the registry"
    registry.write_text(lines)
    return copy


def run(root: Path, *arguments: str) -> str:
    """The output of Python in a process that imports the copy alone."""
    environment = os.environ | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "flag", "names", "taken"),
    [
        ("cpu", "moe_runner_backend", ["numba"], "torch none"),
        pytest.param(
            "hopper", "moe_runner_backend", ["hopper", "triton"], "numba none", marks=pytest.mark.more
        ),
        pytest.param(
            "flashinfer",
            "moe_runner_backend",
            ["flashinfer_cutedsl", "flashinfer_mxfp4"],
            "numba none",
            marks=pytest.mark.more,
        ),
        ("nvlink", "moe_a2a_backend", ["nvlink", "nvlink-experts"], "numba none"),
        pytest.param(
            "deepep", "moe_a2a_backend", ["deepep", "deepep-normal"], "numba none", marks=pytest.mark.more
        ),
    ],
)
def test_a_backend_can_be_deleted(package, tmp_path, backend, flag, names, taken):
    root = without(package, tmp_path, backend)
    (root / "layer.py").write_text(LAYER)
    assert run(root, "layer.py", flag, f"moe.backends.{backend}", *names).split() == taken.split()
    planned = run(root, "-m", "turnout.cli", "plan", "demo", "--device", "cpu", "--json")
    assert f'"runner": "{taken.split()[0]}"' in planned


@pytest.mark.parametrize(
    ("backend", "hardware", "taken"),
    [
        ("cpu", "cpu", "torch"),
        pytest.param("triton", "h200", "torch", marks=pytest.mark.more),
        pytest.param("flash_attn_4", "h200", "triton", marks=pytest.mark.more),
    ],
)
def test_an_attention_backend_can_be_deleted(package, tmp_path, backend, hardware, taken):
    root = without(package, tmp_path, backend, of="attention")
    planned = run(root, "-m", "turnout.cli", "plan", "demo", "--hardware", hardware, "--json")
    assert f'"backend": "{taken}"' in planned
