"""Panel products against plain matrix products in float64."""

from __future__ import annotations

import pytest
import torch

from turnout.kernels.common import panels
from turnout.kernels.common.panels import Panels, panel_width

E, N, K = 5, 96, 40


@pytest.mark.parametrize(
    ("outputs", "width"), [(96, 96), (1024, 64), (2880, 96), (768, 96), (100, 50), (97, 97), (34, 34), (8, 8)]
)
def test_width_divides_and_stays_in_registers_where_it_can(outputs, width):
    assert panel_width(outputs) == width


def make(dtype: torch.dtype, width: int = 32) -> tuple[Panels, torch.Tensor]:
    """Panels, and the matrices in them as float64 [E, N, K]."""
    draw = torch.Generator().manual_seed(0)
    weights_ENK = torch.randn(E, N, K, generator=draw).to(dtype)
    stored = Panels(E, N, K, width, dtype)
    for expert in range(E):
        stored.write(expert, weights_ENK[expert].float())
    return stored, weights_ENK.double()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("sums", "each"), [(0, 2), (1, 1), (7, 1), (7, 3)])
def test_gathered_sums(dtype, rtol, sums, each):
    stored, weights_ENK = make(dtype)
    draw = torch.Generator().manual_seed(1)
    expert_SC = torch.randint(E, (sums, each), generator=draw, dtype=torch.int32)
    x_SCK = torch.randn(sums, each, K, generator=draw).to(dtype)
    ref_SN = torch.einsum("sck,scnk->sn", x_SCK.double(), weights_ENK[expert_SC.long()])
    y_SN = stored.gather_product(expert_SC, x_SCK)
    assert y_SN.dtype == dtype
    assert (y_SN.double() - ref_SN).norm() <= rtol * ref_SN.norm()


@pytest.mark.parametrize("index_rows", [1, 7 * 3 * K, 2 * 7 * 3 * K])
def test_panels_taken_some_at_a_time_give_the_same_bits(monkeypatch, index_rows):
    stored, _ = make(torch.float32)
    expert_SC, x_SCK = torch.randint(E, (7, 3), dtype=torch.int32), torch.randn(7, 3, K)
    at_once = stored.gather_product(expert_SC, x_SCK)
    monkeypatch.setattr(panels, "INDEX_ROWS", index_rows)
    assert torch.equal(stored.gather_product(expert_SC, x_SCK), at_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6])
def test_product_is_in_float32(dtype, rows):
    """bfloat16 rounds the weights, nothing else."""
    stored, weights_ENK = make(dtype)
    x_MK = torch.randn(rows, K)
    out_MN = torch.full((rows, N), torch.nan)
    stored.product(3, x_MK, out_MN)
    torch.testing.assert_close(out_MN.double(), x_MK.double() @ weights_ENK[3].T, rtol=1e-5, atol=1e-5)
