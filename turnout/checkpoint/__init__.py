"""Safetensors in, this rank's weights out, whatever format they were published in.

    folder = locate("Qwen/Qwen3-30B-A3B")     # no torch, no network
    config = read_config(folder)              # no torch
    checkpoint = open_checkpoint(folder)      # headers are checked, nothing is read yet
    checkpoint.linear("model.layers.0.self_attn.q_proj", (4096, 2048), torch.bfloat16)
    checkpoint.experts("model.layers.0.mlp.experts", ExpertShape(...), first=0, count=32)

Everything that is wrong with a checkpoint is a CheckpointError that names the file, the tensor, what was
expected and what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnout.checkpoint.config import read_config
from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.locate import locate
from turnout.checkpoint.names import tensor_names
from turnout.checkpoint.quantization import Quantization
from turnout.checkpoint.quantization_config import parse_quantization
from turnout.lazy import lazy

if TYPE_CHECKING:
    from turnout.checkpoint.checkpoint import Checkpoint, open_checkpoint
    from turnout.checkpoint.experts import ExpertShape
    from turnout.checkpoint.files import ProgressFn

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertShape",
    "ProgressFn",
    "Quantization",
    "locate",
    "open_checkpoint",
    "parse_quantization",
    "read_config",
    "tensor_names",
]

# The server and `plan` read configurations without torch.
__getattr__ = lazy(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "ExpertShape": "experts",
        "ProgressFn": "files",
        "open_checkpoint": "checkpoint",
    },
)
