"""The sorting kernels in Triton's interpreter, against torch's own sort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The interpreter is chosen when the kernels are decorated, so they run in a process of their own.
SCRIPT = Path(__file__).parent / "sort_in_interpreter.py"


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case", ["few", "one", "blocks", "one-expert", "other-ranks", "padding", "slabs", "sum", "sum-bf16"]
)
def test_kernel(results: dict[str, bool], case: str):
    assert results[case]
