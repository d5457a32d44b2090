"""MXFP4 weights to e4m3 in the registers of the tensor cores' first operand, without rounding (Gluon).

Weights lie in fragment order (fragments_fp8.py), so a thread decodes what it multiplies, and every step but
the arithmetic is a renaming of registers. Of 10 instructions for 8 weights, 3 make the tables that a byte
permute looks magnitudes up in, a block's scale included.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _decode_word(j: int, left: int, right: int) -> str:
    """Code word j of four, whose scale is byte j of $12, to registers $left and $right."""
    return f"""
        prmt.b32 s, $12, 0, 0x444{j};
        mad.lo.u32 lo, s, 0x08080800, 0x14100800;
        mad.lo.u32 hi, s, 0x08080808, 0x24201C18;
        and.b32 m, ${8 + j}, 0x77777777;
        prmt.b32 v, lo, hi, m;
        lop3.b32 ${left}, ${8 + j}, 0x80808080, v, 0xEA;
        shr.u32 m, m, 16;
        prmt.b32 v, lo, hi, m;
        shl.b32 t, ${8 + j}, 4;
        lop3.b32 ${right}, t, 0x80808080, v, 0xEA;
    """


DECODE = gl.constexpr(
    "{ .reg .b32 s, lo, hi, m, v, t;"
    + _decode_word(0, 0, 2)
    + _decode_word(1, 1, 3)
    + _decode_word(2, 4, 6)
    + _decode_word(3, 5, 7)
    + "}"
)


@gluon.jit
def decode_words(words, scales):
    """Four words of codes and one of scales, repeated -> e4m3 registers by tile, right half and lower."""
    return gl.inline_asm_elementwise(
        DECODE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, scales],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_block(words, scales, OPERAND: gl.constexpr):
    """words int32 [32, 32], scales int32 [64] of a block -> e4m3 [64, 128]; every step renames registers."""
    AXES: gl.constexpr = gl.BlockedLayout([2, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, 4, 1, 1, 1], [4, 3, 2, 1, 0])
    SHAPE: gl.constexpr = [2, 4, 8, 4, 4]  # pair of tiles, warp, lane / 4, lane % 4, word or place
    words = gl.convert_layout(words.reshape(SHAPE), AXES, assert_trivial=True)
    scales = gl.convert_layout(scales.reshape([2, 4, 8, 1, 1]), AXES).broadcast_to(SHAPE)
    a, b, c, d, e, f, g, h = decode_words(words, scales)  # tile, right, lower
    left = gl.join(gl.join(a, b), gl.join(c, d))
    right = gl.join(gl.join(e, f), gl.join(g, h))
    w = gl.join(left, right)  # pair 0, warp 1, lane / 4 2, lane % 4 3, place 4, lower 5, right 6, tile 7
    w = w.permute([1, 5, 2, 0, 7, 6, 3, 4]).reshape([64, 128])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def decode_from(w, w_scale, stage, BLOCK: gl.constexpr, OPERAND: gl.constexpr):
    """Block BLOCK of a stage as e4m3 [64, 128]."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [32, 32]
    )
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[32]], [[0], [0], [1], [2], [4]], [[8], [16]], [], [64]
    )
    words = w.index(stage).slice(BLOCK * 32, 32).load(CODES)
    return decode_block(words, w_scale.index(stage).slice(BLOCK * 64, 64).load(SCALES), OPERAND)
