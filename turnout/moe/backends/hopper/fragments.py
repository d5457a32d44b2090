"""4-bit weights in the order in which Hopper's tensor cores take them: on the CPU in plain torch.

`wgmma` takes its first operand from registers: for a tile of 64 rows and 16 columns, lane l of warp w holds
rows 16 w + l / 4 and 8 below it, columns 2 (l % 4) and the next, and the same two 8 further on. Weights are
stored so that a thread's share of a 64 x 64 block, four such tiles, is 16 bytes in a row, and so that the
eight codes of a 32-bit word unfold into bf16 with a shift and a mask each.

A code is a sign s and three bits eem of exponent and mantissa. Read as a bf16 with s in bit 15 and eem in
bits 8 to 6, it is the e2m1 value times 2^-126, subnormals included; that factor goes into the block scale.
Each 16-bit half of a word holds four codes, but for C's eem, which lie in the other half:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
          sA eC eC mC sD mD sB eA eA mA sC eD eD eB eB mB

so A needs a mask, B a shift by 6, C a rotation by 10, and D is put together from shifts by 4 to either side.
No four rotations would do, each with one mask: shifts of a code's pattern do not tile 16 bits. Shifts to the
left are multiplications, for which there are units that the rest leaves idle. The low half is column
2 (l % 4), the high half the next one; A and B are rows r and r + 8, C and D the same 8 columns further on.

INT4's codes need no pattern: A to D are the bits 0 to 3, 4 to 7, 8 to 11 and 12 to 15 of each half.

Block scales of e2m1 become one byte each, which with one shift and one addition is a bf16 with the factor
2^126:

    mxfp4: the exponent field itself, relative to the expert's largest scale, which goes into `alpha`
    nvfp4: 5 bits of exponent and 3 of mantissa (e4m3 has 18 binades once its subnormals are normalised)

A zero byte is a zero scale; its codes are set to zero, since nvfp4's zero byte is not a zero in bf16. INT4's
scales are bf16 as they came: that of row r in the low half of a word, that of r + 8 in the high half.

Legend: E experts, N rows, K columns, both padded to multiples of 64 with zero codes and scales; G columns
per scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.formats import e2m1
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

BLOCK = 64
SLACK = 16  # blocks
FOLD_CODES = 1 << 22  # folded at once by torch, which takes tens of bytes a weight
COPY_BYTES = 1 << 27  # of packed weights that a GPU holds next to what it has folded, or one expert's
GROUP: dict[str, int] = {
    format: FORMATS[format].group for format in (Format.MXFP4, Format.NVFP4, Format.INT4)
}
_TOP_FIELD = 253  # of the largest mxfp4 scale of an expert: 2^126


@dataclass(frozen=True, kw_only=True)
class Fragments:
    """Weights [E, N, K] of format "mxfp4", "nvfp4" or "int4".

    codes: int32 [E, N/64, K/64, 512]; scales: int32 [E, N/64, K/64, 32 (mxfp4) or 64];
    alpha: float32 [E], which multiplies every product; rows, columns: N and K before padding.
    """

    format: str
    codes: Tensor
    scales: Tensor
    alpha: Tensor
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.alpha.nbytes


def to_fragments(weights: PackedTensor, *, paired: bool, device: torch.device | str) -> Fragments:
    """[E, N, K] codes and scales in fragment order on `device`.

    paired: the rows are gate then up; every 16 rows become 8 of gate and the 8 of up that belong to them,
    so that one thread's accumulators hold both.
    """
    E, N, K = weights.shape
    height = BLOCK // 2 if paired else BLOCK
    n, k = -(-N // (1 + paired) // height) * (1 + paired) * height // BLOCK, -(-K // BLOCK)
    fragments = Fragments(
        format=str(weights.format),
        codes=_with_slack((E, n, k, 512), device),
        scales=_with_slack(
            (E, n, k, 1024 * FORMATS[weights.format].scale_bytes // GROUP[weights.format]), device
        ),
        alpha=torch.empty(E, device=device),
        rows=N,
        columns=K,
    )
    fill(fragments, weights, paired=paired)
    return fragments


def _with_slack(shape: tuple[int, int, int, int], device: torch.device | str) -> Tensor:
    """int32 [shape] with SLACK more blocks behind it, zero, which kernels read and make nothing of."""
    slack = SLACK * shape[-1]
    whole = torch.empty(math.prod(shape) + slack, dtype=torch.int32, device=device)
    whole[-slack:] = 0
    return whole[:-slack].view(shape)


def fill(fragments: Fragments, weights: PackedTensor, *, paired: bool) -> None:
    """Put `weights` into the storage of `fragments`, few experts at a time."""
    E, N, K = weights.shape
    device = fragments.codes.device
    on_gpu = device.type == "cuda"
    each = (weights.data.nbytes + (0 if weights.scale is None else weights.scale.nbytes)) // E
    some = max(1, COPY_BYTES // each if on_gpu else FOLD_CODES // (N * K))
    for first in range(0, E, some):
        part = slice(first, first + some)
        into = fragments.codes[part], fragments.scales[part], fragments.alpha[part]
        if on_gpu:
            _fold_on_gpu(weights[part].to(device), *into, paired=paired)
            continue
        for mine, new in zip(into, _folded_experts(weights[part].to(device), paired), strict=True):
            mine.copy_(new)


def _fold_on_gpu(
    weights: PackedTensor, codes: Tensor, scales: Tensor, alpha: Tensor, *, paired: bool
) -> None:
    """What `_folded_experts` gives, bit by bit, by a kernel."""
    from turnout.kernels.hopper.fold import fold

    assert weights.scale is not None, f"{weights.format} weights carry scales"
    scale_ENG = weights.scale.contiguous()
    top_E = codes  # in place of it, for formats whose kernel takes none
    if weights.format == Format.INT4:
        scale_ENG = scale_ENG.view(torch.int16)
        alpha.fill_(1)
    elif weights.format == Format.NVFP4:
        scale_ENG = scale_ENG.view(torch.uint8)
        alpha.copy_(_nvfp4_alpha(weights))
    else:
        top_E = scale_ENG.amax(dim=(1, 2)).to(torch.int32)
        alpha.copy_(_mxfp4_alpha(top_E))
    fold(
        weights.data.contiguous(), scale_ENG, top_E, codes, scales,
        format=str(weights.format), group=GROUP[weights.format], paired=paired,
    )  # fmt: skip


def _nvfp4_alpha(weights: PackedTensor) -> Tensor:
    """float32 [e]."""
    assert weights.global_scale is not None, "nvfp4 weights carry a global scale"
    return weights.global_scale.float() * 2.0**8  # the scales are stored divided by 2^8


def _mxfp4_alpha(top: Tensor) -> Tensor:
    """float32, of the largest scale of each expert."""
    return torch.exp2((top - 127).float())


def pair_rows(weight: Tensor) -> Tensor:
    """[..., 2I, K] gate rows then up rows -> 8 of gate, 8 of up, and so on; I a multiple of 8."""
    *lead, N, K = weight.shape
    return weight.view(*lead, 2, N // 16, 8, K).transpose(-4, -3).reshape(*lead, N, K)


def _folded_experts(weights: PackedTensor, paired: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and alpha of [e, N, K], as `Fragments` has them."""
    packed_eNB, scale_eNG = weights.data, weights.scale
    assert scale_eNG is not None, f"{weights.format} weights carry scales"
    code_eNK = e2m1.unpack(packed_eNB)
    if weights.format == Format.INT4:
        bits_eNG = padded(scale_eNG.view(torch.int16), BLOCK // GROUP[weights.format], paired)
        codes = _folded(padded(code_eNK, BLOCK, paired), _fold_int4)
        return codes, _fold_wide_scales(bits_eNG), torch.ones(len(codes))
    if weights.format == Format.NVFP4:
        byte_eNG = _normalised(scale_eNG.view(torch.uint8))
        alpha_e = _nvfp4_alpha(weights)
    else:
        exponent_eNG = scale_eNG.to(torch.int32)
        top_e11 = exponent_eNG.amax(dim=(1, 2), keepdim=True)
        byte_eNG = (exponent_eNG - top_e11 + _TOP_FIELD).clamp(min=0).to(torch.uint8)
        alpha_e = _mxfp4_alpha(top_e11)
    group = GROUP[weights.format]
    code_eNK = code_eNK.masked_fill((byte_eNG == 0).repeat_interleave(group, dim=2), 0)
    code_eNK = padded(code_eNK, BLOCK, paired)
    byte_eNG = padded(byte_eNG, BLOCK // group, paired)
    return (
        _folded(code_eNK, _fold_e2m1),
        _fold_scales(byte_eNG, BLOCK // group).view(torch.int32),
        alpha_e.flatten(),
    )


def padded(t: Tensor, multiple: int, paired: bool) -> Tensor:
    """Rows of [..., N, K] to a multiple of 64, columns to `multiple`, with zeros; gate and up apart, then
    paired."""
    halves = t.chunk(2, dim=-2) if paired else (t,)
    height = BLOCK // len(halves)
    halves_padded = []
    for half in halves:
        *lead, N, K = half.shape
        out = half.new_zeros(*lead, -(-N // height) * height, -(-K // multiple) * multiple)
        out[..., :N, :K] = half
        halves_padded.append(out)
    return pair_rows(torch.cat(halves_padded, dim=-2)) if paired else halves_padded[0]


# Axes of a 64 x 64 block. Rows: warp 4, lower 2, lane / 4 8. Columns: step 4, right 2, lane % 4 4, odd 2.


def _folded(code_eNK: Tensor, halves: Callable[[Tensor], Tensor]) -> Tensor:
    """uint8 codes [e, N, K] -> int32 [e, N/64, K/64, 512] of the 16 bits that `halves` makes of four codes.

    Few rows at a time.
    """
    e, N, K = code_eNK.shape
    rows = max(BLOCK, FOLD_CODES // K // BLOCK * BLOCK)
    folded = []
    for part in code_eNK.view(e * N, K).split(rows):
        n, k = part.shape[0] // BLOCK, part.shape[1] // BLOCK
        axes = part.to(torch.int32).view(n, 4, 2, 8, k, 4, 2, 4, 2)
        # -> n, k, warp, lane / 4, lane % 4, step, odd | right, lower
        half = halves(axes.permute(0, 4, 1, 3, 7, 5, 8, 6, 2))
        folded.append(torch.stack((half & 255, half >> 8), dim=-1).to(torch.uint8).reshape(n, k, 2048))
    return torch.cat(folded).view(torch.int32).view(e, N // BLOCK, K // BLOCK, 512)


def _fold_e2m1(axes: Tensor) -> Tensor:
    """int32 codes [..., odd, right, lower] -> int32 [..., odd], 16 bits each."""
    sign, eem = axes >> 3, axes & 7
    (a, b), (c, d) = ((sign[..., right, 0], sign[..., right, 1]) for right in (0, 1))
    half = a << 15 | b << 9 | c << 5 | d << 11
    (a, b), (c, d) = ((eem[..., right, 0], eem[..., right, 1]) for right in (0, 1))
    return half | a << 6 | b | c.flip(-1) << 12 | (d >> 1) << 3 | (d & 1) << 10


def _fold_int4(axes: Tensor) -> Tensor:
    """The same of INT4."""
    return axes[..., 0, 0] | axes[..., 0, 1] << 4 | axes[..., 1, 0] << 8 | axes[..., 1, 1] << 12


def _fold_scales(byte_eNG: Tensor, per: int) -> Tensor:
    """uint8 [e, N, K/G] -> [e, N/64, K/64, 64 * per]; per: scales of a row of a block, 2 or 4."""
    e, n, k = len(byte_eNG), byte_eNG.shape[1] // BLOCK, byte_eNG.shape[2] // per
    axes = byte_eNG.view(e, n, 4, 2, 8, k, per // 2, 2)  # e, n, warp, lower, lane / 4, k, word, scale
    return axes.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(e, n, k, BLOCK * per)


def _fold_wide_scales(scale_eNG: Tensor) -> Tensor:
    """INT4's, int16 [e, N, K/32] -> int32 [e, N/64, K/64, 64]."""
    e, n, k = len(scale_eNG), scale_eNG.shape[1] // BLOCK, scale_eNG.shape[2] // 2
    axes = scale_eNG.view(e, n, 4, 2, 8, k, 2)  # e, n, warp, lower, lane / 4, k, word
    return axes.permute(0, 1, 5, 2, 4, 6, 3).reshape(e, n, k, 2 * BLOCK).view(torch.int32)


def _normalised(byte: Tensor) -> Tensor:
    """e4m3 bytes (not negative) -> 5 exponent and 3 mantissa bits without subnormals; 0 stays 0."""
    exponent, mantissa = byte.to(torch.int32) >> 3 & 15, byte.to(torch.int32) & 7
    lead = (mantissa >= 2).to(torch.int32) + (mantissa >= 4).to(torch.int32)  # of the subnormal m * 2^-9
    small = lead + 1 << 3 | mantissa << 3 - lead & 7
    normal = exponent + 3 << 3 | mantissa
    return torch.where(exponent > 0, normal, torch.where(mantissa > 0, small, 0)).to(torch.uint8)
