"""MXFP4 weights as e4m3 with one factor per row: exact, and decoded as the kernel's own instructions do."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.moe.backends.hopper.unfold import from_fragments_fp8
from turnout.formats import codec
from turnout.formats.packed import PackedTensor
from turnout.kernels.hopper.decode_fp8 import DECODE
from turnout.moe.backends.hopper.fragments_fp8 import (
    BINADES,
    to_fragments_fp8,
)


def weights(E: int, N: int, K: int, spread: int = 4) -> PackedTensor:
    """Scales differ by some 2 spread binades in a row, and more between rows; some are zero."""
    draw = torch.Generator().manual_seed(N + K)
    plain = torch.randn(E, N, K // 32, 32, generator=draw)
    plain *= torch.exp2(torch.randint(-spread, spread, (E, N, K // 32, 1), generator=draw).float())
    plain *= torch.exp2(torch.randint(-20, 20, (E, N, 1, 1), generator=draw).float())
    plain[0, 3], plain[0, :, 0] = 0, 0
    return codec.encode(plain.flatten(2), "mxfp4")


@pytest.mark.parametrize(
    ("N", "K", "paired"), [(256, 256, False), (192, 96, True), (144, 160, True), (70, 288, False)]
)
def test_nothing_is_lost_within_twelve_binades(N: int, K: int, paired: bool):
    packed = weights(2, N, K)
    fragments = to_fragments_fp8(packed, paired=paired, device="cpu")
    assert torch.equal(from_fragments_fp8(fragments, paired=paired), packed.decode())
    assert fragments.scales.view(torch.uint8).max() == BINADES
    bytes_per_weight = (fragments.codes.nbytes + fragments.scales.nbytes) / (
        fragments.codes.shape[1] * fragments.codes.shape[2] * 2 * 64 * 128
    )
    assert bytes_per_weight == 0.53125


def test_what_lies_below_is_rounded_to_a_part_of_the_row():
    packed = weights(1, 64, 256, spread=12)
    wanted = packed.decode()
    found = from_fragments_fp8(to_fragments_fp8(packed, paired=False, device="cpu"), paired=False)
    error, largest = (found - wanted).abs().amax(2), wanted.abs().amax(2)
    assert (error <= 2.0**-15 * largest).all()
    assert (error > 0).any()


def permute(low: int, high: int, selectors: int) -> int:
    pool = (low | high << 32).to_bytes(8, "little")
    chosen = [selectors >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8, "a set top bit repeats a sign"
    return int.from_bytes(bytes(pool[i] for i in chosen), "little")


INSTRUCTIONS = {
    "prmt.b32": permute,
    "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
}


def run_ptx(text: str, registers: dict[str, int]) -> dict[str, int]:
    """What these instructions leave in 32-bit registers."""
    for name, operands in re.findall(r"([a-z0-9.]+) +([^;]+);", text):
        if name != ".reg":
            to, *given = (part.strip() for part in operands.split(","))
            values = (registers[o] if o in registers else int(o, 0) for o in given)
            registers[to] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
    return registers


def lane(fragments, warp: int, lane: int, pair: int) -> Tensor:
    """float32 [tile 2, right 2, lower 2, place 4]: what a thread decodes of a pair of tiles."""
    start = pair * 512 + (warp * 32 + lane) * 4
    words = fragments.codes[0, 0, 0, start : start + 4].tolist()
    scale = fragments.scales[0, 0, 0, pair * 32 + warp * 8 + lane // 4].item()
    given = {f"${8 + j}": word & 0xFFFFFFFF for j, word in enumerate(words)} | {"$12": scale & 0xFFFFFFFF}
    done = run_ptx(DECODE.value.replace("{", "").replace("}", ""), given)
    octets = b"".join(done[f"${i}"].to_bytes(4, "little") for i in range(8))
    return torch.frombuffer(bytearray(octets), dtype=torch.float8_e4m3fn).float().view(2, 2, 2, 4)


def test_the_kernels_instructions_decode_what_was_stored():
    packed = weights(1, 64, 128)
    fragments = to_fragments_fp8(packed, paired=False, device="cpu")
    wanted = packed.decode()[0] / fragments.alpha[0][:, None]
    for warp, place in ((0, 0), (1, 5), (2, 18), (3, 31)):
        for pair in range(2):
            found = lane(fragments, warp, place, pair)
            for tile, right, lower in product(range(2), repeat=3):
                row = 16 * warp + place // 4 + 8 * lower
                column = 64 * pair + 32 * tile + 16 * right + 4 * (place % 4)
                assert torch.equal(found[tile, right, lower], wanted[row, column : column + 4])
