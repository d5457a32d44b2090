"""4-bit weights to the operand fragments of the tensor cores, in registers (Gluon).

Weights lie in fragment order (fragments.py), so a thread decodes what it multiplies, and every step but the
arithmetic is a renaming of registers. The 2^126 that decoding e2m1 owes is left to be multiplied last. INT4
owes nothing: a code in the mantissa of 128 is the bf16 128 + code, from which 136 is subtracted, and the
product with the scale is rounded to bf16, as the format has it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def bits(size: int, axis: int, rank: int, step: int = 1) -> list[list[int]]:
    """Bases of a linear layout that count `size` steps along an axis."""
    return [[step << i if a == axis else 0 for a in range(rank)] for i in range(size.bit_length() - 1)]


@gluon.constexpr_function
def codes_layout(blocks: int, groups: int) -> gl.DistributedLinearLayout:
    """Who holds codes int32 [blocks, 512] in fragment order: four words in a row are one thread's.

    `wgmma` deals blocks of 64 rows to `groups` groups of four warps in turn.
    """
    registers = bits(4, 1, 2) + bits(blocks // groups, 0, 2, groups)
    warps = bits(4, 1, 2, 128) + bits(groups, 0, 2)
    return gl.DistributedLinearLayout(registers, bits(32, 1, 2, 4), warps, [], [blocks, 512])


@gluon.constexpr_function
def scales_layout(blocks: int, groups: int, words: int) -> gl.DistributedLinearLayout:
    """Who holds their scales int32 [blocks, words]: four threads share `words` / 32 of them."""
    registers = bits(words // 32, 1, 2) + bits(blocks // groups, 0, 2, groups)
    lanes = [[0, 0]] * 2 + bits(8, 1, 2, words // 32)
    warps = bits(4, 1, 2, words // 4) + bits(groups, 0, 2)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [blocks, words])


@gluon.constexpr_function
def scale_words(format: str) -> int:
    """int32 that hold the scales of a block of 64 x 64 weights."""
    return 32 if format == "mxfp4" else 64


@gluon.jit
def packed_tile(
    w_ptr, scales_ptr, expert, n, k_blocks, n_blocks,
    BLOCKS: gl.constexpr, FORMAT: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Pointers to the first 64 columns of codes [BLOCKS, 512] and scales [BLOCKS, 32 or 64] of an expert's
    nth tile of BLOCKS times 64 rows, and which of them exist. CODES: layout of the former."""
    WORDS: gl.constexpr = scale_words(FORMAT)
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    block = (expert * n_blocks + n * BLOCKS) * k_blocks
    b = gl.arange(0, BLOCKS, gl.SliceLayout(1, CODES))[:, None]
    c = gl.arange(0, 512, gl.SliceLayout(0, CODES))[None, :]
    bs = gl.arange(0, BLOCKS, gl.SliceLayout(1, SCALES))[:, None]
    cs = gl.arange(0, WORDS, gl.SliceLayout(0, SCALES))[None, :]
    codes_at = w_ptr + (b * k_blocks + block).to(gl.int64) * 512 + c
    scales_at = scales_ptr + (bs * k_blocks + block).to(gl.int64) * WORDS + cs
    codes_exist = (b < n_blocks - n * BLOCKS) & (c >= 0)
    scales_exist = (bs < n_blocks - n * BLOCKS) & (cs >= 0)
    return codes_at, scales_at, codes_exist, scales_exist


@gluon.jit
def decode_codes(word, scale, scale_below, FORMAT: gl.constexpr):
    """Eight codes and the scales of their two rows -> A, B, C, D of fragments.py, two bf16 each."""
    if FORMAT == "int4":
        return _decode_int4(word, scale, scale_below)
    else:
        return _decode_e2m1(word, scale, scale_below)


@gluon.jit
def _decode_int4(word, scale, scale_below):
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, a, o;
        mov.b32 o, 0x43084308;
        lop3.b32 a, $8, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 a, a, o;
        mul.bf16x2 a, a, $9;
        mov.b32 {$0, $1}, a;
        shr.u32 t, $8, 4;
        lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 a, a, o;
        mul.bf16x2 a, a, $10;
        mov.b32 {$2, $3}, a;
        shr.u32 t, $8, 8;
        lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 a, a, o;
        mul.bf16x2 a, a, $9;
        mov.b32 {$4, $5}, a;
        shr.u32 t, $8, 12;
        lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 a, a, o;
        mul.bf16x2 a, a, $10;
        mov.b32 {$6, $7}, a;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [word, scale, scale_below],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decode_e2m1(word, scale, scale_below):
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u, a;
        and.b32 a, $8, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$0, $1}, a;
        shl.b32 t, $8, 6;
        and.b32 a, t, 0x81C081C0;
        mul.bf16x2 a, a, $10;
        mov.b32 {$2, $3}, a;
        shf.l.wrap.b32 t, $8, $8, 10;
        and.b32 a, t, 0x81C081C0;
        mul.bf16x2 a, a, $9;
        mov.b32 {$4, $5}, a;
        shr.u32 u, $8, 4;
        and.b32 u, u, 0x00400040;
        shl.b32 t, $8, 4;
        lop3.b32 a, t, 0x81808180, u, 0xEA;
        mul.bf16x2 a, a, $10;
        mov.b32 {$6, $7}, a;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [word, scale, scale_below],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_scales(word, FORMAT: gl.constexpr):
    """Words of scales -> those of upper rows and of lower, each scale twice in a word."""
    if FORMAT == "int4":
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;",
            "=r,=r,r",
            [word],
            dtype=(gl.int32,) * 2,
            is_pure=True,
            pack=1,
        )
    else:
        upper0, upper1, lower0, lower1 = _decode_four_scales(word, FORMAT)
        return gl.join(upper0, upper1), gl.join(lower0, lower1)


@gluon.jit
def _decode_four_scales(word, FORMAT: gl.constexpr):
    """Four scale bytes -> four words that hold each scale twice, in bf16 with the factor 2^126."""
    TO_BF16: gl.constexpr = "16, 0x75807580" if FORMAT == "nvfp4" else "128, 0"
    return gl.inline_asm_elementwise(
        f"""
        {{
        .reg .b32 t, u;
        .reg .b16 a, b, c, d;
        prmt.b32 t, $4, 0, 0x4240;
        prmt.b32 u, $4, 0, 0x4341;
        mad.lo.u32 t, t, {TO_BF16};
        mad.lo.u32 u, u, {TO_BF16};
        mov.b32 {{a, c}}, t;
        mov.b32 {{b, d}}, u;
        mov.b32 $0, {{a, a}};
        mov.b32 $1, {{b, b}};
        mov.b32 $2, {{c, c}};
        mov.b32 $3, {{d, d}};
        }}
        """,
        "=r,=r,=r,=r,r",
        [word],
        dtype=(gl.int32,) * 4,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def by_columns(codes, scales, FORMAT: gl.constexpr):
    """codes int32 [BLOCKS, 512] and scales int32 [BLOCKS, 32 or 64] of four warps -> codes, scales of their
    upper rows and of their lower, int32 [BLOCKS, warp, lane / 4, lane % 4, column / 32, column / 16] each.

    Every step is a renaming of registers.
    """
    AXES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2, 2], [1, 1, 8, 4, 1, 1], [1, 4, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    BLOCKS: gl.constexpr = codes.shape[0]
    SHAPE: gl.constexpr = [BLOCKS, 4, 8, 4, 2, 2]
    PER: gl.constexpr = 2 if FORMAT == "nvfp4" else 1
    upper, lower = decode_scales(scales, FORMAT)
    upper = upper.reshape([BLOCKS, 4, 8, 1, 2, PER])
    lower = lower.reshape([BLOCKS, 4, 8, 1, 2, PER])
    word = gl.convert_layout(codes.reshape(SHAPE), AXES)
    upper = gl.convert_layout(upper, AXES).broadcast_to(SHAPE)
    return word, upper, gl.convert_layout(lower, AXES).broadcast_to(SHAPE)


@gluon.jit
def decode_halves(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """Arguments as of `by_columns` -> bf16 [64 * BLOCKS, 32], columns 0 to 31, and 32 to 63."""
    left, right = halves(codes, scales, FORMAT)
    return decode_half(left, FORMAT, OPERAND), decode_half(right, FORMAT, OPERAND)


@gluon.jit
def halves(codes, scales, FORMAT: gl.constexpr):
    """What `decode_half` takes of [64 * BLOCKS, 64]: of columns 0 to 31, and of 32 to 63."""
    word, upper, lower = by_columns(codes, scales, FORMAT)
    word0, word1 = _halves(word)
    upper0, upper1 = _halves(upper)
    lower0, lower1 = _halves(lower)
    return (word0, upper0, lower0), (word1, upper1, lower1)


@gluon.jit
def halves_held(w, scales, slot, BLOCK: gl.constexpr, FORMAT: gl.constexpr):
    """`halves` of 64 weight rows in shared memory, w int32 [., ., 512] and scales [., ., 32 or 64]."""
    CODES: gl.constexpr = codes_layout(1, 1)
    SCALES: gl.constexpr = scales_layout(1, 1, scale_words(FORMAT))
    codes = w.index(slot).slice(BLOCK, 1).load(CODES)
    return halves(codes, scales.index(slot).slice(BLOCK, 1).load(SCALES), FORMAT)


@gluon.jit
def _halves(word):
    """What belongs to columns below and above 32."""
    return gl.split(word.permute([0, 1, 2, 3, 5, 4]))


@gluon.jit
def decode_half(words, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """-> bf16 [64 * BLOCKS, 32]."""
    word, upper, lower = words
    a0, a1, b0, b1, c0, c1, d0, d1 = decode_codes(word, upper, lower, FORMAT)
    left = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    right = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    w = gl.join(left, right)  # block 0, warp 1, lane / 4 2, lane % 4 3, step 4, odd 5, lower 6, right 7
    w = w.permute([0, 1, 6, 2, 4, 7, 3, 5]).reshape([word.shape[0] * 64, 32])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def decode_quarters(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """The same -> bf16 [64 * BLOCKS, 16], columns 0 to 15, 16 to 31, 32 to 47, and 48 to 63."""
    word, upper, lower = by_columns(codes, scales, FORMAT)
    word0, word1, word2, word3 = _quarters(word)
    upper0, upper1, upper2, upper3 = _quarters(upper)
    lower0, lower1, lower2, lower3 = _quarters(lower)
    w0 = _decode_quarter(word0, upper0, lower0, FORMAT, OPERAND)
    w1 = _decode_quarter(word1, upper1, lower1, FORMAT, OPERAND)
    w2 = _decode_quarter(word2, upper2, lower2, FORMAT, OPERAND)
    return w0, w1, w2, _decode_quarter(word3, upper3, lower3, FORMAT, OPERAND)


@gluon.jit
def _quarters(word):
    """What belongs to each 16 columns, int32 [BLOCKS, 4, 8, 4]."""
    left, right = gl.split(word.permute([0, 1, 2, 3, 5, 4]))
    left0, left1 = gl.split(left)
    right0, right1 = gl.split(right)
    return left0, left1, right0, right1


@gluon.jit
def _decode_quarter(word, upper, lower, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """int32 [BLOCKS, 4, 8, 4] -> bf16 [64 * BLOCKS, 16]."""
    a0, a1, b0, b1, c0, c1, d0, d1 = decode_codes(word, upper, lower, FORMAT)
    left = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    right = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    w = gl.join(left, right)  # block 0, warp 1, lane / 4 2, lane % 4 3, odd 4, lower 5, right 6
    w = w.permute([0, 1, 5, 2, 6, 3, 4]).reshape([word.shape[0] * 64, 16])
    return gl.convert_layout(w, OPERAND, assert_trivial=True)
