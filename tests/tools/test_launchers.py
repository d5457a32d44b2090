"""The comparison of launchers, where there is nothing to compare."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.launchers import RAY


@pytest.mark.skipif(not RAY.lacking(), reason="Ray is installed")
def test_without_ray():
    """Said before any server starts."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.launchers"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("not installed here; pip install 'turnout[ray]'")
    assert "Traceback" not in done.stderr
