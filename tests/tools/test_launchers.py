"""The comparison of launchers, where there is nothing to compare."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_RAY = """
import runpy, sys

class Hidden:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
sys.argv = ["launchers"]
runpy.run_module("tools.launchers", run_name="__main__")
"""


def test_without_ray() -> None:
    """Said before any server starts."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("not installed here; pip install 'turnout[ray]'")
    assert "Traceback" not in done.stderr
