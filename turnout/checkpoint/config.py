"""`config.json`, and the quantisation record that some writers keep next to it. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.checkpoint.errors import CheckpointError

CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"


def read_config(folder_or_file: Path) -> dict[str, Any]:
    """A model's configuration, its `quantization_config` completed from `hf_quant_config.json`.

    Takes a checkpoint folder or the path of a bare configuration. ModelOpt's own file is used where
    `config.json` says nothing about quantisation; where both speak they must name the same algorithm. A
    configuration of another name may lie next to those of other models, and says everything itself.
    Raises CheckpointError for a file that is missing, unreadable, or not a JSON object.
    """
    path = folder_or_file / CONFIG if folder_or_file.is_dir() else folder_or_file
    if not path.is_file():
        raise CheckpointError(
            "is missing", file=path, remedy="A model is a folder that holds config.json and *.safetensors"
        )
    config = read_json_object(path)
    sibling = path.with_name(MODELOPT_CONFIG)
    if path.name == CONFIG and sibling.is_file():
        config["quantization_config"] = _merge(config.get("quantization_config"), path, sibling)
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object; anything else is a CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({error})", file=path) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            "has the wrong type", file=path, expected="a JSON object", found=type(value).__name__
        )
    return value


def _merge(inside: Any, path: Path, sibling: Path) -> Any:
    record = read_json_object(sibling).get("quantization")
    if not isinstance(record, dict):
        raise CheckpointError("has no object named quantization", file=sibling)
    if inside is None:
        return {"quant_method": "modelopt", **record}
    ours, theirs = (_algorithm(value) for value in (inside, record))
    if ours is not None and theirs is not None and ours != theirs:
        raise CheckpointError(
            "names another quantisation than config.json",
            file=sibling,
            expected=ours,
            found=theirs,
            remedy=f"Correct whichever of {path.name} and {sibling.name} is out of date",
        )
    # Only one of them may say how each layer was quantised.
    return (
        {**inside, "quantized_layers": record["quantized_layers"]} if "quantized_layers" in record else inside
    )


def _algorithm(record: Any) -> str | None:
    algorithm = record.get("quant_algo") if isinstance(record, dict) else None
    return str(algorithm).upper() if algorithm is not None else None
