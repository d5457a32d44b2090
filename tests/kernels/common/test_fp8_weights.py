"""Products by weights that stay e4m3: in Triton's interpreter, compiled for Hopper, and on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code
from turnout.formats.fp8 import encode_blocks
from turnout.formats.packed import PackedTensor
from turnout.models import dense
from turnout.models.shares import Share, whole
from turnout.vocabulary import Format

CASES = [
    "decode",
    "rows",
    "rows-many",
    "rows-some",
    "rows-odd",
    "parts",
    "parts-long",
    "few",
    "few-not",
    "both",
    "both-not",
    "sums",
    "gates",
]


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/fp8_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.parametrize(("width", "steps"), [(256, 1), (128, 4)])
def test_weights_are_decoded_before_rows_are_waited_for(width: int, steps: int):
    from turnout.kernels.common.split_gemm import multiply_part

    constants = {"ROWS": 16, "OUTPUTS": 64, "COLUMNS": width, "STEPS": steps, "GROUP": 128, "PDL": True}
    constants |= {"SHORT": False, "BIAS": False}
    multiples = ("M", "K", "x_stride", "w_stride")
    done = compiled(multiply_part, constants, warps=4, multiples=multiples, w_ptr="*fp8e4nv")
    early, late = done.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global" in early
    assert "e4m3x2" in early
    assert "wgmma" in late
    assert done.metadata.shared < 50_000  # so that several programs fit


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_are_multiplied_in_registers(rows: int, tmp_path: Path):
    """Weights are loaded 16 bytes at a time, before rows are waited for, and multiplied where they are: one
    instruction for each and a row, and no scale for each."""
    from turnout.kernels.common.few_rows import OUTPUTS, REGISTERS, RESIDENT, multiply_few_rows

    for more in (False, True):
        constants = {"ROWS": rows, "OUTPUTS": OUTPUTS, "MORE": more, "PDL": True}
        done = compiled(
            multiply_few_rows, constants, warps=4, stages=1, multiples=("M", "K", "x_stride"),
            most_registers=REGISTERS, w_ptr="*fp8e4nv", more_ptr="*bf16",
        )  # fmt: skip
        instructions, needs = machine_code(done, tmp_path)
        assert "MMA." not in instructions.replace("FFMA.", "")
        used = re.search(r"REG:(\d+) STACK:(\d+)", needs.split("multiply_few_rows")[1])
        assert used is not None
        assert int(used[2]) <= (24 if more else 8)  # bytes
        assert int(used[1]) * 128 * RESIDENT <= 65536
        if more:
            continue
        early, _ = done.asm["ptx"].split("griddepcontrol.wait")
        each = OUTPUTS * 512 // 128
        assert early.count("ld.global.v4") == each // 16
        # The sums of 16 begin with a product, and end with one by their scale, which is added up.
        assert instructions.count("FFMA") + instructions.count("FMUL") <= rows * each + rows * each // 16


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [(12288, 2048, 2), (4096, 2048, 2), (2048, 4096, 4), (1024, 2048, 4), (2048, 512, 1), (2112, 7168, 7),
     (24576, 1536, 1), (7168, 16384, 1), (36864, 7168, None)],
)  # fmt: skip
def test_parts_of_few_rows_leave_multiprocessors_at_work(outputs: int, inputs: int, parts: int | None):
    """parts: of what was measured those that took least of one row, or 1.5 % more."""
    from turnout.kernels.common import few_rows

    count = few_rows.part_count(outputs, inputs)
    assert parts in (count, None)
    assert inputs % (count * few_rows.STEP) == 0
    assert count <= 8  # whoever adds them up reads them all
    if outputs * inputs >= 2048 * 4096:
        floor = outputs * inputs / few_rows.BYTES_PER_US
        assert few_rows.expected_us(count, outputs, inputs) < 1.4 * floor + 0.5


SHAPES = [(5120, 2048), (2048, 4096), (2112, 7168), (7168, 2048), (576, 512), (70, 1408), (12288, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 33, 64, 65, 200, 256, 257, 1500])
def test_products_on_a_gpu(rows: int, M: int, K: int):
    """In all three ways, next to products by the decoded weights in float64."""
    torch.manual_seed(0)
    data, scale = encode_blocks(torch.randn(M, K) * K**-0.5)
    packed = PackedTensor(format=Format.FP8, data=data, scale=scale)
    weight = dense.Fp8Weight.of(packed, whole(M), whole(K))
    assert weight is not None
    weight, decoded = weight.to(torch.device("cuda")), packed.decode().cuda().bfloat16()
    x, bias = torch.randn(rows, K, device="cuda").bfloat16(), torch.randn(M, device="cuda").bfloat16()
    wanted = x.double() @ decoded.double().T
    for multiply in (dense.linear, dense.invariant_linear):
        torch.testing.assert_close(multiply(x, weight).double(), wanted, atol=0.02, rtol=0.01)
        torch.testing.assert_close(
            multiply(x, weight, bias).double(), wanted + bias.double(), atol=0.03, rtol=0.01
        )
    parts = dense.product(dense.linear, x, weight, None)
    added = parts.sum(0) if parts.dim() == 3 else parts
    torch.testing.assert_close(added.double(), wanted, atol=0.02, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K"), [(12288, 2048), (2048, 4096), (7168, 16384), (70, 1536)])
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_on_a_gpu(rows: int, M: int, K: int):
    """In all numbers of parts, next to products by the decoded weights in float64."""
    from turnout.kernels.common import few_rows

    torch.manual_seed(0)
    data, scale = (found.cuda() for found in encode_blocks(torch.randn(M, K) * K**-0.5))
    scale_GM = scale.repeat_interleave(128, 0)[:M].T.contiguous()
    decoded = data.double() * scale_GM.T.repeat_interleave(128, 1)[:, :K].double()
    x = torch.randn(rows, K, device="cuda").bfloat16()
    assert few_rows.runs(x, data, 128)
    for count in (None, *few_rows.counts(M, K)):
        found = few_rows.parts(x, data, scale_GM, count).double().sum(0)
        torch.testing.assert_close(found, x.double() @ decoded.T, atol=1e-4, rtol=1e-4)
    more = (torch.randn(80, K, device="cuda") * K**-0.5).bfloat16()
    found = few_rows.parts(x, data, scale_GM, None, more).double().sum(0)
    both = torch.cat((decoded, more.double()))
    torch.testing.assert_close(found, x.double() @ both.T, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_shared_expert_by_few_rows_on_a_gpu(rows: int, monkeypatch: pytest.MonkeyPatch):
    """With its gate in the same launch, next to separate products; one row also as part of a layer's sum."""
    from turnout.kernels.common import few_rows
    from turnout.models.blocks import GatedMLP

    torch.manual_seed(0)
    H, inner = 2048, 512
    weights = []
    for M, K in ((2 * inner, H), (H, inner)):
        data, scale = encode_blocks(torch.randn(M, K) * K**-0.5)
        packed = PackedTensor(format=Format.FP8, data=data, scale=scale)
        weight = dense.Fp8Weight.of(packed, whole(M), whole(K))
        assert weight is not None
        weights.append(weight.to(torch.device("cuda")))
    gate = (torch.randn(1, H, device="cuda") * H**-0.5).bfloat16()
    mlp = GatedMLP(*weights, token_gate=gate)
    x, more = torch.randn(rows, H, device="cuda").bfloat16(), torch.randn(1, H, device="cuda").bfloat16()

    def results() -> list[torch.Tensor]:
        found = [mlp(x)] + ([mlp.begin_row(x)(more)] if rows == 1 else [])
        return [(y.sum(0) if y.dim() == 3 else y).float() for y in found]

    with monkeypatch.context() as patched:
        patched.setattr(few_rows, "MOST_ROWS", 0)
        wanted = results()
    for found, expected in zip(results(), wanted, strict=True):
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_a_row_depends_on_nothing_else_on_a_gpu():
    torch.manual_seed(0)
    data, scale = encode_blocks(torch.randn(576, 1024))
    packed = PackedTensor(format=Format.FP8, data=data, scale=scale)
    weight = dense.Fp8Weight.of(packed, Share(576, 64, 300), whole(1024))
    assert weight is not None
    weight = weight.to(torch.device("cuda"))
    x = torch.randn(200, 1024, device="cuda").bfloat16()
    y = dense.invariant_linear(x, weight)
    for size in (1, 3, 17, 64, 130):
        assert torch.equal(dense.invariant_linear(x[:size], weight), y[:size])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70, 3000])
def test_gates_on_a_gpu(rows: int):
    from turnout.kernels.common.rows import gate

    x = torch.randn(rows, 2 * 1408, device="cuda").bfloat16()
    wanted = F.silu(x[:, :1408].float()) * x[:, 1408:].float()
    torch.testing.assert_close(gate(x, torch.bfloat16).float(), wanted, atol=0.02, rtol=0.01)
