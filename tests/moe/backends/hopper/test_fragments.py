"""Fragment order: the inverse gives back every weight, and the layout is the one `wgmma` documents."""

from __future__ import annotations

import pytest
import torch

from tests.moe.backends.hopper.unfold import from_fragments, unpair_rows
from turnout.formats import codec
from turnout.formats.packed import PackedTensor
from turnout.moe.backends.hopper import fragments
from turnout.moe.backends.hopper.fragments import pair_rows, to_fragments

SHAPES = [(64, 64, False), (128, 192, False), (96, 64, False), (192, 96, True), (32, 64, True)]


def weights(format: str, rows: int, columns: int, experts: int = 3) -> PackedTensor:
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(experts, rows, columns, generator=draw)
    return codec.encode(plain * torch.tensor([1e-3, 1.0, 30.0])[:experts, None, None], format)


@pytest.mark.parametrize(("rows", "columns", "paired"), SHAPES)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4"])
def test_inverse_gives_back_the_weights(format: str, rows: int, columns: int, paired: bool):
    packed = weights(format, rows, columns)
    back = from_fragments(to_fragments(packed, paired=paired, device="cpu"), paired=paired)
    torch.testing.assert_close(back, packed.decode(), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "paired"), SHAPES)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4"])
def test_a_gpu_folds_to_the_same_bits(
    format: str, rows: int, columns: int, paired: bool, monkeypatch: pytest.MonkeyPatch
):
    """Two of three experts at a time."""
    monkeypatch.setattr(fragments, "COPY_BYTES", rows * columns * 5 // 4)
    packed = weights(format, rows, columns)
    wanted, found = (to_fragments(packed, paired=paired, device=device) for device in ("cpu", "cuda"))
    for name in ("codes", "scales", "alpha"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


def test_every_scale_survives():
    """All e4m3 scales that are not negative, subnormals and zero with them."""
    byte = torch.arange(127, dtype=torch.uint8).repeat(64, 1)
    scale = torch.zeros(1, 64, 128, dtype=torch.uint8)
    scale[0, :, :127] = byte
    data = torch.randint(
        0, 256, (1, 64, 128 * 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    packed = PackedTensor(
        format="nvfp4", data=data, scale=scale.view(torch.float8_e4m3fn), global_scale=torch.tensor([0.37])
    )
    back = from_fragments(to_fragments(packed, paired=False, device="cpu"), paired=False)
    torch.testing.assert_close(back, packed.decode(), rtol=1e-6, atol=0)


def test_mxfp4_scales_far_apart():
    """Relative to the largest of the expert, 2^-125 still counts; what is smaller becomes zero."""
    scale = torch.full((1, 64, 4), 200, dtype=torch.uint8)
    scale[0, :, 1], scale[0, :, 2] = 75, 0
    data = torch.full((1, 64, 64), 0x22, dtype=torch.uint8)
    packed = PackedTensor(format="mxfp4", data=data, scale=scale)
    back = from_fragments(to_fragments(packed, paired=False, device="cpu"), paired=False)
    assert back[0, 0, 0] == 2.0**73
    assert back[0, 0, 32] == 2.0**-52
    assert back[0, 0, 64] == 0


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_threads_hold_what_wgmma_asks_for(format: str):
    """The PTX manual's figure for the first operand in registers, m64k16: thread by thread."""
    code = torch.randint(0, 16, (64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    one = torch.full((1, 64, 2), 127, dtype=torch.uint8) if format == "mxfp4" else torch.ones(1, 64, 2)
    packed = PackedTensor(
        format=format,
        data=(code[:, ::2] | code[:, 1::2] << 4)[None],
        scale=one if format == "mxfp4" else one.bfloat16(),
    )
    words = to_fragments(packed, paired=False, device="cpu").codes.view(128, 4)
    for thread in (0, 1, 5, 31, 32, 77, 127):
        row = 16 * (thread // 32) + thread % 32 // 4
        for step in range(4):
            column = 16 * step + 2 * (thread % 4)
            word = int(words[thread, step]) & 0xFFFFFFFF
            registers = [(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)]
            made, wanted = (unfold, expand) if format == "mxfp4" else (unfold_int4, expand_int4)
            for (r, c), bits in zip(registers, made(word), strict=True):
                assert [bits & 0xFFFF, bits >> 16] == [wanted(int(code[r, c])), wanted(int(code[r, c + 1]))]


def test_int4_scales_are_those_of_a_threads_rows():
    """Row r in the low half of a word, row r + 8 in the high half; a word for each 32 columns."""
    scale = torch.randn(64, 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    data = torch.zeros(1, 64, 32, dtype=torch.uint8)
    packed = PackedTensor(format="int4", data=data, scale=scale[None])
    words = to_fragments(packed, paired=False, device="cpu").scales.view(4, 8, 2)
    for warp, row, group in ((0, 0, 0), (1, 3, 1), (3, 7, 0)):
        halves = words[warp, row, group].view(1).view(torch.bfloat16)
        assert torch.equal(halves, scale[[16 * warp + row, 16 * warp + row + 8], group])


def unfold(word: int) -> list[int]:
    """The four operand registers, by the instructions of the kernel."""
    mask = 0x81C081C0
    rotated = word << 10 | word >> 22
    last = (word << 4 & 0x81808180) | (word >> 4 & 0x00400040)
    return [word & mask, word << 6 & mask, rotated & mask, last]


def unfold_int4(word: int) -> list[int]:
    return [(word >> 4 * i & 0x000F000F) | 0x43004300 for i in range(4)]


def expand_int4(code: int) -> int:
    """128 + code as bf16 bits."""
    return int(torch.tensor(128.0 + code).bfloat16().view(torch.int16))


def expand(code: int) -> int:
    """An e2m1 code as bf16 bits, times 2^-126."""
    return (code & 8) << 12 | (code & 7) << 6


def test_pairing_rows_alternates_gate_and_up():
    gate_up = torch.arange(64).view(64, 1).float()
    paired = pair_rows(gate_up)
    assert paired[:24, 0].tolist() == [*range(8), *range(32, 40), *range(8, 16)]
    assert torch.equal(unpair_rows(paired), gate_up)
