"""Residual streams and turned heads in Triton's interpreter, and on a GPU at real sizes, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.attention.interface import Attention
from turnout.attention.kinds import CompressedSpec
from turnout.models.blocks import Norm
from turnout.models.compressed_attention import CompressedProjection, turned
from turnout.models.dense import linear
from turnout.models.spec import StreamSpec
from turnout.models.streams import StreamWeights
from turnout.parallel.groups import SINGLE_RANK

CASES = ["added", "parts", "many", "cut", "embedding", "none"]
CASES += ["turn", "turn-back", "turn-normed", "turn-parts", "divide", "divide-parts"]


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/streams_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def test_compiled_for_hopper():
    """At the sizes of DeepSeek-V4-Flash, with products on tensor cores."""
    from turnout.kernels.common.streams import (
        COLUMNS,
        MIXED,
        ROWS,
        STEPS,
        stream_mixture,
        stream_products,
    )

    halves = dict.fromkeys(("x_ptr", "total_ptr", "gain_ptr", "mixed_ptr"), "*bf16")
    sizes = {"S": 4, "C": 24, "CP": 32, "PDL": True}
    for added, y, steps in ((0, "*bf16", 1), (1, "*bf16", STEPS), (8, "*fp32", 1)):
        constants = sizes | {"ADDED": added, "ROWS": ROWS, "COLUMNS": COLUMNS, "STEPS": steps}
        done = compiled(stream_products, constants, warps=4, multiples=("H",), y_ptr=y, **halves)
        assert "mma.sync" in done.asm["ptx"]
    constants = sizes | {"BP": 128, "ITERATIONS": 20, "BLOCK": MIXED, "eps": 1e-6, "norm_eps": 1e-6}
    for blocks, last in ((1, False), (8, False), (1, True)):
        more = {"BLOCKS": blocks, "LAST": last, "gain_eps": 1e-6}
        compiled(stream_mixture, constants | more, warps=4, multiples=("H",), **halves)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 128, 4000])
def test_streams_on_a_gpu(rows: int):
    torch.manual_seed(0)
    parts = {
        "fn": torch.randn(24, 4 * 4096) / 64,
        "base": torch.randn(24),
        "scale": torch.tensor([1.5, 0.7, 1.2]),
    }
    spec = StreamSpec(count=4, iterations=20, eps=1e-6)
    x, y = torch.randn(rows, 4, 4096).bfloat16(), torch.randn(rows, 4096).bfloat16()
    post, gain = torch.rand(rows, 4), torch.rand(4096).bfloat16()
    on_gpu = StreamWeights(spec=spec, norm_eps=1e-6, **{k: v.cuda() for k, v in parts.items()})
    found = on_gpu.of_sum(x.cuda(), (post.cuda(), y.cuda()), Norm(gain.cuda(), 1e-6))
    wanted = StreamWeights(spec=spec, norm_eps=1e-6, **parts).of_sum(x, (post, y), Norm(gain, 1e-6))
    last = {name: part[: 1 if name == "scale" else 4] for name, part in parts.items()}
    on_gpu = StreamWeights(spec=spec, norm_eps=1e-6, **{k: v.cuda() for k, v in last.items()})
    found += on_gpu.collapsed(x.cuda(), (post.cuda(), y.cuda()), Norm(gain.cuda(), 1e-6))
    wanted += StreamWeights(spec=spec, norm_eps=1e-6, **last).collapsed(x, (post, y), Norm(gain, 1e-6))
    for ours, theirs in zip(found, wanted, strict=True):
        # Sums of what rounds to bfloat16 at up to 8, where a unit in the last place is 1/32.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=1 / 32 + 1e-3)


def test_divided_rows_compile_for_hopper():
    """At the sizes of DeepSeek-V4-Flash."""
    from turnout.kernels.common.turned import COPIED, HEADS, divide_rows, turn_heads

    names = ("query_gain_ptr", "kv_gain_ptr", "cos_ptr", "sin_ptr", "q_ptr", "kv_ptr", "raw_ptr")
    halves = dict.fromkeys((*names, "weight_ptr"), "*bf16")
    constants = {"LP": 1024, "DP": 512, "BLOCK": COPIED, "scale": 0.1, "eps": 1e-6, "PDL": True}
    compiled(divide_rows, constants | {"PARTS": 8}, warps=4, multiples=("L", "D", "X"), **halves)
    constants = {"DP": 512, "HEADS": HEADS, "NORM": True, "BACK": False, "eps": 1e-6, "PDL": True}
    compiled(turn_heads, constants | {"PARTS": 4}, warps=4, multiples=("D", "row_stride"), **halves)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_projections_on_a_gpu(rows: int):
    """What queries, keys, entries and an index are made of, and the output, next to torch's in float32."""
    torch.manual_seed(0)
    spec = CompressedSpec(
        num_heads=16,
        num_kv_heads=1,
        head_dim=512,
        value_dim=512,
        scale=0.1,
        rope_dim=64,
        sinks=True,
        recent=128,
        output_groups=4,
        rate=4,
        overlap=True,
        index_heads=8,
        index_dim=128,
        index_topk=512,
    )

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(size) * size[-1] ** -0.5).bfloat16()

    weights = {
        "down": drawn(1024 + 512 + spec.open_dim + 8, 2048),
        "query_up": drawn(16 * 512, 1024),
        "index_up": drawn(8 * 128, 1024),
        "out_a_GZX": drawn(4, 256, 4 * 512),
        "out_b": drawn(2048, 4 * 256),
    }
    norms = {"query_norm": 1024, "query_unit": 512, "kv_norm": 512}
    norms = {name: 1 + drawn(size) for name, size in norms.items()}
    x, drawn_angles = drawn(rows, 2048) * 40, torch.randn(rows, 1, 32)
    cos, sin = drawn_angles.cos().repeat(1, 1, 2), torch.cat((-drawn_angles.sin(), drawn_angles.sin()), -1)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):

        def there(tensor: torch.Tensor, device: str = device, dtype: torch.dtype = dtype) -> torch.Tensor:
            return tensor.to(device, dtype)

        kept: list[torch.Tensor] = []
        projection = CompressedProjection(
            0,
            spec,
            sinks=torch.zeros(16),
            compressors=(None, None),
            group=SINGLE_RANK.attention_tp,
            linear=linear,
            **{name: there(weight) for name, weight in weights.items()},
            **{name: Norm(there(weight), 1e-6) for name, weight in norms.items()},
        )
        out = projection(there(x), {spec.rope: (there(cos), there(sin))}, Kept(kept))
        found.append([*kept, out.sum(0) if out.dim() == 3 else out])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs, rtol=5e-2, atol=5e-2)


class Kept(Attention):
    """Attends to nothing but the queries themselves."""

    def __init__(self, kept: list[torch.Tensor]):
        self._kept = kept

    def compressed(self, layer, q_NHD, kv_ND, sinks_H, rest):
        self._kept += [q_NHD, kv_ND, rest.raw_NX, rest.index_queries, rest.index_weights]
        return q_NHD


@pytest.mark.gpu
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rows", [1, 3000])
def test_turned_heads_on_a_gpu(rows: int, back: bool):
    torch.manual_seed(0)
    x, angles = torch.randn(rows, 64, 512).bfloat16(), torch.randn(rows, 1, 32)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    found = turned(x.cuda(), (cos.cuda(), sin.cuda()), back=back)
    torch.testing.assert_close(found.cpu(), turned(x, (cos, sin), back=back), rtol=2e-2, atol=2e-2)
