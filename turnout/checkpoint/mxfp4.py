"""MXFP4 experts as OpenAI published GPT-OSS; `turnout quantize --format mxfp4` writes the same.

    {prefix}.gate_up_proj_blocks  uint8 [E, 2I, H/32, 16]      two e2m1 codes per byte, 32 columns per block
    {prefix}.gate_up_proj_scales  uint8 [E, 2I, H/32]          e8m0: 2 ** (b - 127)
    {prefix}.gate_up_proj_bias    float [E, 2I]                where the architecture has biases
    {prefix}.down_proj_*          likewise, [E, H, I/32, ...]

Rows of gate_up_proj are interleaved: gate 0, up 0, gate 1, up 1, ... Nothing but experts is quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.checkpoint.experts import Wanted, copy_rows, read_stacked_bias
from turnout.checkpoint.parts import E8M0_SCALE, Part
from turnout.formats.experts import ExpertWeights
from turnout.formats.mxfp4 import GROUP
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

SCALES = Part("_scales", (torch.uint8, torch.float8_e8m0fnu), columns=GROUP, sound=E8M0_SCALE)
WHY = "config.json says that these experts are stored as MXFP4"


def experts(wanted: Wanted) -> ExpertWeights:
    wide, down = (
        f"{wanted.prefix}.{name}"
        for name in ("gate_up_proj" if wanted.shape.gated else "up_proj", "down_proj")
    )
    gated = wanted.shape.gated
    wanted.require_columns(GROUP)
    return ExpertWeights(
        w13=_matrix(wanted, "w13", wide, interleaved=gated),
        w2=_matrix(wanted, "w2", down, interleaved=False),
        b13=read_stacked_bias(wanted, "w13", f"{wide}_bias", interleaved=gated),
        b2=read_stacked_bias(wanted, "w2", f"{down}_bias", interleaved=False),
        first_expert=wanted.first,
        num_experts=wanted.shape.num_experts,
    )


def _matrix(wanted: Wanted, matrix: str, module: str, *, interleaved: bool) -> PackedTensor:
    n, k = wanted.shape.matrix(matrix)
    groups = (wanted.shape.num_experts, n, k // GROUP)
    blocks, scales = f"{module}_blocks", f"{module}{SCALES.suffix}"
    wanted.files.expect(blocks, (*groups, GROUP // 2), (torch.uint8,), why=WHY)
    wanted.files.expect(scales, groups, SCALES.dtypes, why=WHY)
    data = _rows(wanted, blocks, interleaved).flatten(2)
    scale = _rows(wanted, scales, interleaved)
    SCALES.check(wanted.files, scales, scale)
    return PackedTensor(format=Format.MXFP4, data=data, scale=scale.view(torch.uint8))


def _rows(wanted: Wanted, name: str, interleaved: bool) -> Tensor:
    """Entries [n, ...] of a stacked tensor, gate rows before up rows."""
    files = wanted.files
    if not interleaved:
        return files.read(name, first=wanted.first, count=wanted.count)
    meta = files.meta(name)
    out = torch.empty((wanted.count, *meta.shape[1:]), dtype=meta.dtype)
    for i, expert in enumerate(wanted.local):  # one at a time, so that little is held twice
        copy_rows(files.read(name, first=expert, count=1)[0], out[i], interleaved=True)
    return out
