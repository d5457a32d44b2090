"""From what the user calls a model to the folder that holds it. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from turnout.checkpoint.config import CONFIG
from turnout.errors import UserError

ASSETS = Path(__file__).parent.parent / "assets"
BUNDLED = {"demo": ASSETS / "demo"}
_BELOW = ("snapshots/*", "*")  # where models lie in a folder of the Hugging Face cache, or of a user's models
# owner/name or name, as the hub allows: letters, digits and single - _ . between them.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(model: str) -> Path:
    """The folder of a bundled model, of a local path, or of a hub id already in the local cache.

    The path of a `config.json` stands for the folder it lies in. A configuration of another name, such as
    `qwen3.json`, has no folder and is itself returned: enough for a plan, and `require_folder` refuses it
    where weights are needed.
    A folder of one's own that is called like a bundled model is `./demo`. Never uses the network.
    Raises UserError saying what to do when there is no such model.
    """
    if model in BUNDLED:
        return _bundled(model)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        return _file(path)
    if _HUB_ID.fullmatch(model):
        cached = _cached(model)
        if cached is not None:
            return cached
        bundled = f", or one of {', '.join(BUNDLED)}" if "/" not in model else ""
        raise UserError(
            f"no model {model!r}: neither a local folder nor in the local Hugging Face cache. "
            f"Fetch it with `hf download {model}`, or give the path of a checkpoint folder{bundled}"
        )
    raise UserError(
        f"no model {model!r}: there is no such folder. Give the path of a checkpoint folder, a hub id "
        f"such as Qwen/Qwen3-30B-A3B, or {' or '.join(BUNDLED)}"
    )


def require_folder(path: Path) -> None:
    """Raise UserError for a configuration without weights; `path` is what `locate` returned."""
    if path.is_file():
        raise UserError(
            f"{path} is a configuration without weights, enough for `turnout plan` only: give the folder "
            f"that holds {CONFIG}, *.safetensors and tokenizer.json"
        )


def require_model(path: Path) -> None:
    """Raise UserError unless `path`, which `locate` returned, is a folder with a configuration."""
    require_folder(path)
    if not (path / CONFIG).is_file():
        below = next((found.parent for places in _BELOW for found in path.glob(f"{places}/{CONFIG}")), None)
        hint = f"give {below}, which does" if below else "give the folder that does"
        raise UserError(f"{path}: holds no {CONFIG}; {hint}, next to *.safetensors and tokenizer.json")


def _bundled(model: str) -> Path:
    folder = BUNDLED[model]
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"the bundled model {model!r} is not part of this installation (looked in {folder}). "
            "Install turnout from its repository, or give the path of a checkpoint folder"
        )
    return folder


def _file(path: Path) -> Path:
    if path.name == CONFIG:
        return path.parent
    if path.suffix.lower() == ".json":
        return path
    raise UserError(
        f"{path} is a file: give the folder that holds {CONFIG} and *.safetensors, or for `turnout plan` a "
        "configuration named *.json"
    )


def _cached(repo_id: str) -> Path | None:
    """The snapshot of `repo_id` (revision main) in the Hugging Face cache, if its config is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, CONFIG)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
