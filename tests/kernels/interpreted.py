"""Running kernels in Triton's interpreter.

The interpreter is chosen when kernels are decorated, so scripts that use it run in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def results(script: str) -> dict[str, bool]:
    """What the script, a path below this folder, printed last, as JSON: whether each case is right."""
    module = ".".join(["tests", "kernels", *Path(script).with_suffix("").parts])
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
