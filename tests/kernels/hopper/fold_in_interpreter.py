"""Run by test_fold.py with TRITON_INTERPRET=1: weights folded by the kernel and by torch; prints JSON."""

from __future__ import annotations

import json

import torch

from tests.kernels import interpreter
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS
from turnout.moe.backends.hopper import fragments

interpreter.prepare()
draw = torch.Generator().manual_seed(0)
results = {}


def bytes_of(*shape: int, below: int = 256) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=draw)


def packed(format: str, experts: int, rows: int, columns: int) -> PackedTensor:
    """Every code, and every scale that may be, zeros often among them."""
    data = bytes_of(experts, rows, columns // 2)
    shape = experts, rows, columns // FORMATS[format].group
    if format == "int4":
        scale = torch.randn(shape, generator=draw).bfloat16()
        return PackedTensor(format=format, data=data, scale=scale)
    scale = bytes_of(*shape, below=127 if format == "nvfp4" else 255)
    scale.masked_fill_(bytes_of(*shape, below=5) == 0, 0)
    if format == "mxfp4":
        scale[0] //= 2  # experts of unlike largest scales
        return PackedTensor(format=format, data=data, scale=scale)
    scale.masked_fill_(bytes_of(*shape, below=9) == 0, 0x80)  # -0
    return PackedTensor(
        format=format, data=data, scale=scale.view(torch.float8_e4m3fn),
        global_scale=torch.rand(experts, generator=draw),
    )  # fmt: skip


def equal(packed: PackedTensor, *, paired: bool) -> bool:
    """The kernel writes each word, of all experts, and nothing behind them."""
    wanted = fragments.to_fragments(packed, paired=paired, device="cpu")
    codes, scales = torch.full_like(wanted.codes, -7), torch.full_like(wanted.scales, -7)
    more = torch.full((2, 512), -7, dtype=torch.int32)
    codes = torch.cat((codes.view(-1, 512), more)).view(-1)[: codes.numel()].view(codes.shape)
    alpha = torch.full_like(wanted.alpha, -7)
    fragments._fold_on_gpu(packed, codes, scales, alpha, paired=paired)
    behind = codes.as_strided((1024,), (1,), codes.numel())
    good = torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales)
    return good and torch.equal(alpha, wanted.alpha) and bool((behind == -7).all())


for format in ("nvfp4", "mxfp4", "int4"):
    for rows, columns, pair in (
        (64, 64, False),
        (72, 96, False),
        (130, 160, False),
        (192, 96, True),
        (48, 64, True),
    ):
        results[f"{format}-{rows}-{columns}-{pair}"] = equal(packed(format, 2, rows, columns), paired=pair)
results["nvfp4-80-48-False"] = equal(packed("nvfp4", 2, 80, 48), paired=False)
some = packed("nvfp4", 4, 64, 128)
assert some.scale is not None
assert some.global_scale is not None
part = PackedTensor(
    format="nvfp4", data=some.data[1:3, :, 32:], scale=some.scale[1:3, :, 4:],
    global_scale=some.global_scale[1:3],
)  # fmt: skip
results["columns"] = equal(part, paired=False)
print(json.dumps(results))
