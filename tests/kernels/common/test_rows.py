"""The steps between a decoder's products in Triton's interpreter, and on a GPU at real sizes."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.formats.fp8 import encode_blocks
from turnout.formats.packed import PackedTensor
from turnout.kernels.common.rowwise import product
from turnout.models.dense import Fp8Weight, linear, normed_product
from turnout.models.shares import whole
from turnout.moe.routing import Router
from turnout.moe.spec import Routing
from turnout.vocabulary import Format, RoutingKind

CASES = [
    "norm",
    "gate",
    "gated-product",
    "normed-product",
    "whole-row",
    "rotate",
    "rotate-only",
    "angles",
    "softmax-topk",
    "topk-softmax",
    "sigmoid",
    "sigmoid-groups",
    "roots",
    "by-token",
    "exact-product",
    "sigmoid-odd",
    "odd",
    "none",
]


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/rows_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def test_the_end_of_a_shared_expert_compiles_for_hopper():
    """It loads its weights before it waits, 16 bytes at a time."""
    from turnout.kernels.common.gated_row import multiply_gated_row
    from turnout.kernels.common.rows import gate_rows

    constants = {"PARTS": 8, "TOKEN_PARTS": 8, "OUTPUTS": 64, "COLUMNS": 256, "GROUP": 0, "PDL": True}
    halves = {"w_ptr": "*bf16", "scale_ptr": "*bf16", "more_ptr": "*bf16"}
    multiples = ("M", "K", "X", "w_stride")
    done = compiled(multiply_gated_row, constants, warps=4, multiples=multiples, x_ptr="*fp32", **halves)
    early = done.asm["ptx"].partition("griddepcontrol.wait")[0]
    assert len(re.findall(r"ld\.global\S*\.v4", early)) == 64 * 256 // (128 * 8)
    constants = {"PARTS": 8, "TOKEN_PARTS": 8, "LIMITED": False, "BLOCK": 512, "PDL": True}
    numbers = {"limit": 0.0} | constants
    compiled(gate_rows, numbers, warps=4, multiples=("M", "X", "token_stride"), x_ptr="*fp32")


@pytest.mark.gpu
def test_angles_on_a_gpu():
    """Up to a million tokens, as torch computes them."""
    from turnout.kernels.common.rows import angles

    torch.manual_seed(0)
    positions = torch.cat((torch.randint(2**20, (999,)), torch.tensor([0, 2**20 - 1]))).cuda()
    frequencies, scaling, signs = torch.rand(3, 64, device="cuda").unbind()
    cos, sin = angles(positions, frequencies, scaling, signs, torch.float32)
    wanted = positions[:, None].float() * frequencies
    torch.testing.assert_close(cos, wanted.cos() * scaling, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sin, wanted.sin() * signs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_norm_and_rotation_on_a_gpu(rows: int):
    from turnout.kernels.common.rows import norm, rotate

    torch.manual_seed(0)
    x, delta, weight = (
        torch.randn(*s, device="cuda").bfloat16() for s in ((rows, 2048), (rows, 2048), (2048,))
    )
    total, normed = norm(x, weight, 1e-6, delta)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (2048,), weight, 1e-6), rtol=1e-2, atol=1e-2)
    heads = torch.randn(rows, 40 * 128, device="cuda").bfloat16()
    weight = torch.randn(36, 128, device="cuda").bfloat16()
    angles = torch.randn(rows, 64, device="cuda")
    cos = angles.cos().repeat(1, 2).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), 1).bfloat16()
    q, k = rotate(heads, 32, 4, cos, sin, weight, 1e-6)
    both = heads.float().view(rows, 40, 128)[:, :36]
    both = F.rms_norm(both, (128,), eps=1e-6) * weight.float()
    wanted = both * cos[:, None] + both.roll(64, -1) * sin[:, None]
    torch.testing.assert_close(torch.cat((q, k), 1).float(), wanted, rtol=1e-2, atol=1e-2)
    cache = torch.zeros(4, rows + 5, 2, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(rows + 5, device="cuda")[:rows]
    stored, _ = rotate(heads, 32, 4, cos, sin, weight, 1e-6, store=(cache, slots))
    assert torch.equal(stored, q)
    assert torch.equal(cache[:, slots, 0].transpose(0, 1), k)
    assert torch.equal(cache[:, slots, 1].transpose(0, 1), heads.view(rows, 40, 128)[:, 36:])


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (64, 512, 10), (3000, 60, 4)])
def test_choice_of_experts_on_a_gpu(tokens: int, experts: int, top_k: int):
    from turnout.kernels.common.route import choose

    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device="cuda")  # float32, where ties are rare
    counts = torch.zeros(experts, dtype=torch.int64, device="cuda")
    real = torch.rand(tokens, device="cuda") < 0.9
    ids, weights = choose(
        logits, top_k, of_all=True, renormalize=True, scaling=1.0, real_T=real, counts_E=counts
    )
    shares, wanted = logits.softmax(-1).topk(top_k)
    assert torch.equal(ids, wanted.int().masked_fill(~real[:, None], -1))
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True) * real[:, None])
    assert counts.sum() == real.sum() * top_k


def test_choice_by_token_compiles_for_hopper():
    from turnout.kernels.common.route import choose_by_token
    from turnout.kernels.common.split_gemm import EXACT_OUTPUTS, multiply_exactly

    constants = {"PARTS": 16, "K": 6, "KP": 8, "RENORMALIZE": True, "PADDED": True, "PDL": True}
    integers = {"table_ptr": "*i32", "tokens_ptr": "*i64", "ids_ptr": "*i32", "counts_ptr": "*i64"}
    compiled(choose_by_token, constants | {"scaling": 1.5}, warps=1, real_ptr="*i1", **integers)
    constants = {"ROWS": 4, "OUTPUTS": EXACT_OUTPUTS, "COLUMNS": 256, "PDL": True}
    compiled(multiply_exactly, constants, warps=4, multiples=("K", "x_stride", "w_stride"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_choice_by_token_on_a_gpu(tokens: int):
    """Of DeepSeek-V4-Flash, with the product before it, which is in float32."""
    torch.manual_seed(0)
    weight, table = torch.randn(256, 4096) / 64, torch.rand(1000, 256).topk(6).indices.int()
    x, token_ids = torch.randn(tokens, 4096).bfloat16(), torch.randint(1000, (tokens,))
    real = torch.rand(tokens) < 0.9
    routing = Routing(kind=RoutingKind.SQRT_SOFTPLUS_TOPK, scaling_factor=1.5)
    sizes = {"num_experts": 256, "top_k": 6}
    found = []
    for device in ("cpu", "cuda"):
        router = Router(routing, **sizes, device=torch.device(device), experts_of_token=table.to(device))
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        multiply = partial(product, F.linear) if router.adds_parts else lambda x, w, _: F.linear(x.float(), w)
        logits = multiply(x.to(device), weight.to(device), None)
        ids, weights = router(logits, real.to(device), counts, token_ids.to(device))
        found.append((ids.cpu(), weights.cpu(), counts.cpu()))
    (wanted, shares, counted), (ids, weights, counts) = found
    assert torch.equal(ids, wanted)
    assert torch.equal(counts, counted)
    torch.testing.assert_close(weights, shares, rtol=1e-4, atol=1e-4)


def test_a_float32_weight_with_a_bias_is_not_multiplied_in_parts_of_16_bits():
    from turnout.kernels.common import split_gemm

    x, weight, bias = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(128, 256), torch.zeros(128)
    assert split_gemm.parts(x, weight, bias) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_product_of_a_float32_weight_with_a_bias_on_a_gpu(rows: int):
    """A router's, of hidden states in bfloat16."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 256).bfloat16(), torch.randn(128, 256), torch.randn(128)
    found = product(F.linear, x.cuda(), weight.cuda(), bias.cuda())
    torch.testing.assert_close(found.cpu(), F.linear(x.float(), weight, bias), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kept_in_fp8", [False, True])
def test_shared_expert_with_a_gate_on_a_gpu(kept_in_fp8: bool):
    """At 35B-A3B's sizes, next to float32 of the same weights: alone, and added to a row in parts."""
    from turnout.kernels.common.fp8_weights import decode
    from turnout.models.blocks import GatedMLP

    torch.manual_seed(0)
    H, inner = 2048, 512
    weights = [torch.randn(*s, device="cuda") * s[1] ** -0.5 for s in ((2 * inner, H), (H, inner), (1, H))]
    gate_up, down, own = (w.bfloat16() for w in weights)

    def kept(w: torch.Tensor) -> Fp8Weight:
        data, scale = encode_blocks(w.float().cpu())
        packed = PackedTensor(format=Format.FP8, data=data, scale=scale)
        found = Fp8Weight.of(packed, whole(len(w)), whole(w.shape[1]))
        assert found is not None
        return found.to(torch.device("cuda"))

    mlp = GatedMLP(gate_up, down, token_gate=own)
    if kept_in_fp8:
        fp8 = [kept(w) for w in (gate_up, down)]
        mlp = GatedMLP(*fp8, token_gate=own)
        gate_up, down = (decode(w.data_MK, w.scale_GM, w.group, torch.bfloat16) for w in fp8)
    assert mlp.adds_row
    for rows in (1, 5, 33, 3000):
        x = torch.randn(rows, H, device="cuda").bfloat16()
        gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=1)
        wanted = (F.silu(gate) * up) @ down.float().T * (x.float() @ own.float().T).sigmoid()
        found = mlp(x)  # parts of few rows
        found = found.sum(0) if found.dim() == 3 else found.float()
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    more = torch.randn(1, H, device="cuda").bfloat16()
    found = mlp.begin_row(x[:1])(more)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(0), wanted[:1] + more, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 1, 16])
def test_norm_and_product_of_a_row_on_a_gpu(parts: int):
    """Both kept in FP8 and not, next to norm and product in launches of their own."""
    from turnout.kernels.common.rows import norm

    torch.manual_seed(0)
    for M, H in ((5120, 2048), (128, 2048), (2112, 7168)):
        x, gain = torch.randn(1, H, device="cuda").bfloat16(), torch.rand(H, device="cuda").bfloat16()
        delta = None if parts == 0 else torch.randn(parts, 1, H, device="cuda")
        delta = delta[0].bfloat16() if delta is not None and parts == 1 else delta
        data, scale = encode_blocks(torch.randn(M, H) * H**-0.5)
        kept = Fp8Weight.of(PackedTensor(format=Format.FP8, data=data, scale=scale), whole(M), whole(H))
        assert kept is not None
        plain = (torch.randn(M, H, device="cuda") * H**-0.5).bfloat16()
        for weight in (plain, kept.to(torch.device("cuda"))):
            apart = norm(x, gain, 1e-6, delta)
            wanted = linear(apart[1], weight)
            found = normed_product(linear, x, delta, gain, 1e-6, weight)
            assert found is not None
            assert torch.equal(found[0], apart[0])
            torch.testing.assert_close(found[1], apart[1], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(found[2].sum(0).bfloat16(), wanted, rtol=2e-2, atol=2e-2)
