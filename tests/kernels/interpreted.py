"""Running kernels in Triton's interpreter.

The interpreter is chosen when kernels are decorated, so scripts that use it run in processes of their own:
copies of one that has imported torch and Triton, which takes longer than most of them.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any


def results(script: str) -> dict[str, bool]:
    """What the script, a path below this folder, printed last, as JSON: whether each case is right."""
    return printed(".".join(["tests", "kernels", *Path(script).with_suffix("").parts]))


def printed(module: str, *arguments: str) -> Any:
    """What `python -m module arguments` printed last, as JSON."""
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps([module, *arguments]) + "\n")
    server.stdin.flush()
    code, said = json.loads(server.stdout.readline())
    assert code == 0, said
    return json.loads(said.splitlines()[-1])


@cache
def _server() -> subprocess.Popen[str]:
    """Runs the modules that it reads of, and ends with this process, which is the end of its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _run(module: str, *arguments: str) -> tuple[int, str]:
    """(exit code, what it wrote) of a copy of this process that runs `module`."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.argv[1:] = arguments
                runpy.run_module(module, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return code, said.read().decode()


if __name__ == "__main__":
    import torch.distributed  # noqa: F401
    import triton.language  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
