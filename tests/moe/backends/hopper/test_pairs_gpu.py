"""Few pairs on a GPU, which are not sorted: with padding, other ranks' experts only, and odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.build import expert_slice, make_experts, make_plan, make_spec
from turnout.moe.accuracy import BOUNDS, relative_error
from turnout.moe.backends.hopper.kernels import Pairs, refuse
from turnout.moe.backends.hopper.tile_config import LayerTiles
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.reference import experts_reference
from turnout.moe.routing import Router
from turnout.moe.spec import Routing
from turnout.vocabulary import RoutingKind

pytestmark = pytest.mark.gpu
TOP_K = 6
OTHERS = {  # than the rule's: strips side by side and two in a warp, pairs in rounds, slices without columns
    "packed": LayerTiles(Pairs(64, 1, 256, 1, 8, 1, 2), Pairs(32, 1, 256, 3, 8, 2, 4)),
    "bf16": LayerTiles(Pairs(32, 1, 128, 4, 4, 1, 4), Pairs(32, 1, 128, 2, 16, 2, 8)),
}


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("held", [(0, 16), (4, 5)])
@pytest.mark.parametrize(
    ("format", "activation"), [("mxfp4", "swiglu"), ("nvfp4", "relu2"), ("bf16", "silu")]
)
def test_few_pairs(format: str, activation: str, held: tuple[int, int], other: bool):
    spec = make_spec(activation, format, hidden_size=736, intermediate_size=352, num_experts=16, top_k=TOP_K)
    first, count = held
    plan = make_plan(
        spec, runner="hopper", weight_storage="packed", compute_dtype="bfloat16", first=first, count=count
    )
    experts = expert_slice(make_experts(spec), first, count)
    runner = RUNNERS.load("hopper")(spec, plan, torch.device("cuda"))
    runner.prepare(experts)
    tiles = OTHERS[runner.shape.weights] if other else runner._tiles(1)
    assert isinstance(tiles.first, Pairs)
    assert not refuse(runner.shape, tiles)
    runner.use_tiles(((1, tiles),))
    tokens = Pairs.most_pairs // TOP_K
    draw = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, 736, generator=draw).bfloat16()
    weights_TK, ids_TK = torch.rand(tokens, 16, generator=draw).topk(TOP_K)
    ids_TK[1], weights_TK[1] = -1, 0
    ids_TK[2] = torch.arange(TOP_K) + 10  # another rank's all, if there is one
    ids_TK[3, ::2] = -1
    wanted_TH = experts_reference(x_TH.float(), ids_TK, weights_TK, experts, spec.activation)

    def run(rows: slice) -> torch.Tensor:
        return runner(
            TokensBatch(
                hidden=Hidden(data=x_TH[rows].cuda()),
                topk_ids=ids_TK[rows].int().cuda(),
                topk_weights=weights_TK[rows].cuda(),
            )
        ).cpu()

    out_TH = run(slice(None))
    assert relative_error(out_TH.float(), wanted_TH) < BOUNDS["bf16", "bfloat16"]
    assert not out_TH[~wanted_TH.any(dim=1)].any()
    alone_TH = torch.cat([run(slice(i, i + 1)) for i in range(tokens)])
    assert torch.equal(alone_TH, out_TH)
    assert run(slice(0, 0)).shape == (0, 736)
    assert not runner._spaces["tokens"].counts.any()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "bf16"])
def test_a_norm_may_add_pairs_up(format: str):
    """A row for each pair of a token, in their order, unless GEMM2 adds them."""
    spec = make_spec("swiglu", format, hidden_size=1024, intermediate_size=512, num_experts=16, top_k=TOP_K)
    plan = make_plan(
        spec, runner="hopper", weight_storage="packed", compute_dtype="bfloat16", max_tokens=1000
    )
    runner = RUNNERS.load("hopper")(spec, plan, torch.device("cuda"))
    runner.prepare(make_experts(spec))
    draw = torch.Generator().manual_seed(0)
    for tokens in (1, 20, 100, 256, 257, 1000):
        weights_TK, ids_TK = torch.rand(tokens, 16, generator=draw).topk(TOP_K)
        batch = TokensBatch(
            hidden=Hidden(data=torch.randn(tokens, 1024, generator=draw).bfloat16().cuda()),
            topk_ids=ids_TK.int().cuda(),
            topk_weights=weights_TK.cuda(),
        )
        wanted_TH, parts = runner(batch), runner(replace(batch, adds_parts=True))
        left = runner._tiles(tokens).second.leaves_pairs
        assert parts.shape == ((TOP_K, tokens, 1024) if left else (tokens, 1024))
        assert torch.equal(parts.float().sum(0).bfloat16() if left else parts, wanted_TH)
        assert left or tokens != 20 or format == "fp8"
        assert not runner._spaces["tokens"].counts.any()


@pytest.mark.parametrize("kind", [RoutingKind.SOFTMAX_TOPK, RoutingKind.TOPK_SOFTMAX])
@pytest.mark.parametrize(
    ("format", "experts", "parts"), [("nvfp4", 128, 1), ("mxfp4", 40, 3), ("bf16", 8, 1)]
)
def test_one_token_may_choose_its_experts(format: str, experts: int, parts: int, kind: RoutingKind):
    """The largest, of equals the first; a token that is padding chooses none. The choices are counted."""
    spec = make_spec("silu", format, hidden_size=512, intermediate_size=256, num_experts=experts, top_k=TOP_K)
    plan = make_plan(spec, runner="hopper", weight_storage="packed", compute_dtype="bfloat16")
    runner = RUNNERS.load("hopper")(spec, plan, torch.device("cuda"))
    weights = make_experts(spec)
    runner.prepare(weights)
    assert runner.chooses()
    draw = torch.Generator().manual_seed(experts)
    for renormalize in (False, True):
        routing = Routing(kind=kind, renormalize=renormalize, scaling_factor=1.5)
        router = Router(routing, num_experts=experts, top_k=TOP_K, device=torch.device("cuda"))
        for case in ("drawn", "ties", "padding", "infinite"):
            logits = torch.randn(parts, 1, experts, generator=draw) * 3
            if case == "ties":
                logits = logits.round() / 2
            if case == "infinite":
                logits[0, 0, 1:3] = -torch.inf
            x = torch.randn(1, 512, generator=draw).bfloat16()
            ids_1K = logits.sum(0).sort(descending=True, stable=True).indices[:, :TOP_K]
            weights_1K = logits.sum(0).softmax(-1).gather(1, ids_1K)
            if renormalize or kind == RoutingKind.TOPK_SOFTMAX:
                weights_1K = weights_1K / weights_1K.sum()
            weights_1K = weights_1K * routing.scaling_factor
            wanted = experts_reference(x.float(), ids_1K, weights_1K, weights, spec.activation)
            real = torch.tensor([case != "padding"]).cuda()
            counts = torch.zeros(experts, dtype=torch.int64).cuda()
            choice = router.late(logits.cuda(), real, counts)
            assert choice is not None
            batch = TokensBatch(
                hidden=Hidden(data=x.cuda()),
                topk_ids=torch.full((1, TOP_K), 10**6, dtype=torch.int32).cuda(),
                topk_weights=torch.full((1, TOP_K), torch.nan).cuda(),
                choice=choice,
            )
            found = runner(batch).cpu().float()
            if case == "padding":
                assert not found.any()
                assert not counts.any()
                continue
            assert relative_error(found, wanted) < BOUNDS["bf16", "bfloat16"], case
            assert counts.nonzero()[:, 0].tolist() == sorted(ids_1K[0].tolist()), case
            assert int(counts.sum()) == TOP_K
