"""`python -m turnout.kernels.cpu`: compiles every kernel now, so that no first start has to."""

from importlib import import_module
from pathlib import Path

for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"turnout.kernels.cpu.{file.stem}")
