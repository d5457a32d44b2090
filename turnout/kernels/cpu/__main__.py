"""`python -m turnout.kernels.cpu`: compiles every kernel now, so that no first start has to.

Two processes take half the time of one. The second begins with experts, which this one fetches when it comes
to what calls them.
"""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

PACKAGE = "turnout.kernels.cpu"

import_module(f"{PACKAGE}.team")  # both need it
experts = subprocess.Popen([sys.executable, "-c", f"import {PACKAGE}.experts_bf16"])
import_module(f"{PACKAGE}.attention")
import_module(f"{PACKAGE}.delta_rule")
import_module(f"{PACKAGE}.recurrent_layer")
if code := experts.wait():
    sys.exit(code)
for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{PACKAGE}.{file.stem}")
