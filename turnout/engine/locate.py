"""MODEL -> folder: the bundled model, a local folder, or a snapshot in the Hugging Face cache. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from turnout.errors import UserError

DEMO = Path(__file__).parents[1] / "assets" / "demo"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(model: str) -> Path:
    """The folder of `model`: "demo", a folder, the path of a bare `config.json`, or a hub id whose
    snapshot is on this machine already (nothing is downloaded). Raises UserError."""
    if model == "demo":
        folder = DEMO
    elif (path := Path(model).expanduser()).exists():
        folder = path.parent if path.name == "config.json" else path
    else:
        folder = _cached_snapshot(model)
    if not (folder / "config.json").is_file():
        raise UserError(f"{model}: {folder} holds no config.json; MODEL must be a model's folder")
    return folder


def _cached_snapshot(model: str) -> Path:
    if not _HUB_ID.fullmatch(model):
        raise UserError(f"{model}: no such folder; MODEL is a local folder, a cached hub id, or `demo`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UserError(
            f"{model}: no such folder, and no snapshot of it in the Hugging Face cache; "
            f"download it first: `hf download {model}`"
        ) from None
