"""The table of model architectures: what each serves, and what of it is compared with transformers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from tests.models.families import FAMILIES
from tools.tables import table
from turnout.registry import ARCHITECTURES

# Those that most tests of Turnout run on, in every format of docs/formats.md.
BASES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
COMPARED = tuple(dict.fromkeys(family.architecture for family in FAMILIES.values()))
# How the formats of tests/models/families.py are published.
PUBLISHED_AS = {
    "bf16": "bf16",
    "fp8": "FP8 blocks",
    "fp8-ue8m0": "FP8 blocks with ue8m0 scales",
    "fp8-block": "FP8 blocks (compressed-tensors)",
    "fp8-dynamic": "FP8 by row (compressed-tensors)",
    "modelopt": "NVFP4 (ModelOpt)",
    "modelopt-mixed": "NVFP4 with FP8 attention (ModelOpt)",
    "modelopt-fp8-nvfp4": "NVFP4 experts with FP8 blocks (ModelOpt)",
    "compressed-tensors": "NVFP4 (compressed-tensors)",
    "mxfp4": "MXFP4 experts",
    "compressed-mxfp4": "MXFP4 (compressed-tensors)",
    "int4-kimi": "INT4 experts in groups of 32 (compressed-tensors)",
    "fp4": "MXFP4 experts with FP8 blocks",
}


def architectures(published: Path) -> str:
    """published: the folder of configurations that are planned for."""
    header = ("architecture", "models", "formats compared", "published configurations planned")
    return table(header, [_row(name, published) for name in ARCHITECTURES])


def _row(name: str, published: Path) -> tuple[str, str, str, str]:
    models = (import_module(_module(name)).__doc__ or "").partition("\n")[0]
    configurations = [
        path.stem
        for path in sorted(published.glob("*.json"))
        if name in json.loads(path.read_text())["architectures"]
    ]
    return f"`{name}`", models.rstrip("."), _compared(name), ", ".join(configurations)


def _compared(name: str) -> str:
    if name in BASES:
        return "all of [formats](docs/formats.md)"
    families = [family for family in FAMILIES.values() if family.architecture == name]
    if not families:  # another name of an architecture that is compared
        module = _module(name)
        return next(f"as `{other}`" for other in COMPARED if _module(other) == module)
    formats = [format for family in families for format in (*family.formats, *family.own_formats)]
    return ", ".join(dict.fromkeys(PUBLISHED_AS[format] for format in formats))


def _module(name: str) -> str:
    return ARCHITECTURES.target(name).partition(":")[0]
