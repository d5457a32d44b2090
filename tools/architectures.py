"""The table of model architectures: what each serves, and what of it is compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from tests.models.families import FAMILIES
from tools.tables import table
from turnout.registry import ARCHITECTURES

# Those that most tests of Turnout run on, in every format of docs/formats.md.
BASES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def architectures(published: Path) -> str:
    """published: the folder of configurations that are planned for."""
    header = ("architecture", "models", "published formats compared", "published configurations planned")
    return table(header, [_row(name, published) for name in ARCHITECTURES])


def _row(name: str, published: Path) -> tuple[str, str, str, str]:
    module = import_module(ARCHITECTURES.target(name).partition(":")[0])
    models = (module.__doc__ or "").partition("\n")[0]
    formats = [f for family in FAMILIES.values() if family.architecture == name for f in family.formats]
    configurations = [
        path.stem
        for path in sorted(published.glob("*.json"))
        if name in json.loads(path.read_text())["architectures"]
    ]
    compared = (
        "all of [formats](docs/formats.md)"
        if name in BASES
        else _code(dict.fromkeys(formats)) or "with the whole model's"
    )
    return f"`{name}`", models.rstrip("."), compared, ", ".join(configurations)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
