"""The whole layer against transformers' MoE blocks, and what it owes its caller."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.moe.bounds import relative_error
from tests.moe.build import ACTIVATIONS, expert_slice, make_experts, make_plan, make_spec
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.moe import MoELayer, plan
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.interface import Experts
from turnout.moe.routing import route
from turnout.moe.spec import MoESpec, Routing
from turnout.parallel import hardware
from turnout.parallel.groups import Groups
from turnout.parallel.topology import Topology
from turnout.vocabulary import Phase

H, I, E, K = 64, 48, 8, 2
TOKENS = (1, 5, 40)  # both ways through the torch runner


def block(cls: type[torch.nn.Module], model_type: str, **fields) -> torch.nn.Module:
    """transformers' MoE block with random weights, in its plain per-expert loop."""
    config = AutoConfig.for_model(model_type, hidden_size=H, num_experts_per_tok=K, **fields)
    config._experts_implementation = "eager"
    module = cls(config).eval()
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn_like(tensor) * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1)
    return module.requires_grad_(False)


def stacked(w13: torch.Tensor, w2: torch.Tensor, **biases: torch.Tensor) -> ExpertWeights:
    w13, w2 = (PackedTensor(format="bf16", data=w.contiguous()) for w in (w13, w2))
    return ExpertWeights(w13=w13, w2=w2, num_experts=E, **biases)


def spec_of(routing: Routing = Routing(), **fields) -> MoESpec:
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K}
    return MoESpec(routing=routing, **(sizes | fields))


def assert_same(layer: MoELayer, theirs) -> None:
    for tokens in TOKENS:
        x = torch.randn(tokens, H)
        assert relative_error(layer(x), theirs(x.unsqueeze(0)).squeeze(0)) < 1e-5


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3(renormalize):
    theirs = block(
        Qwen3MoeSparseMoeBlock,
        "qwen3_moe",
        num_experts=E,
        moe_intermediate_size=I,
        norm_topk_prob=renormalize,
    )
    spec = spec_of(Routing(renormalize=renormalize))
    weights = stacked(theirs.experts.gate_up_proj, theirs.experts.down_proj)
    assert_same(MoELayer(spec, make_plan(spec), router_weight=theirs.gate.weight, experts=weights), theirs)


@dataclass
class Noting:
    """A runner that notes whether its caller adds parts up, and then leaves two."""

    own: Experts
    noted: list[bool] = field(default_factory=list)

    def prepare(self, experts: ExpertWeights) -> None:
        self.own.prepare(experts)

    def update(self, experts: ExpertWeights) -> None:
        self.own.update(experts)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch)
        out_TH = self.own(batch)
        self.noted.append(batch.adds_parts)
        return torch.stack((3 * out_TH, -2 * out_TH)) if batch.adds_parts else out_TH


@pytest.mark.parametrize(
    ("may", "changed"),
    [
        (True, {}),
        (False, {"first": 2, "count": 4}),  # others have to be added
        (False, {"chunk": 3}),
        (False, {"deterministic": True}),
        (False, {"shared_expert": "whole"}),
    ],
    ids=["whole", "slice", "chunks", "deterministic", "shared"],
)
def test_parts_are_left_only_where_nothing_else_is_added(may: bool, changed: dict):
    spec, changed = make_spec("swiglu", "bf16"), dict(changed)
    held = {key: changed.pop(key) for key in ("first", "count") if key in changed}
    shared = {"shared_expert": lambda x: x} if changed.pop("shared_expert", "") else {}
    plan = make_plan(spec, **held)
    if chunk := changed.pop("chunk", 0):
        plan = replace(plan, **{phase: replace(plan.phase(phase), chunk=chunk) for phase in Phase})
    plan = replace(plan, **changed)
    experts = expert_slice(make_experts(spec), plan.first_expert, plan.num_local_experts)
    runner = Noting(RUNNERS.load("torch")(spec, plan, torch.device("cpu")))
    router = torch.randn(spec.num_experts, spec.hidden_size)
    layer = MoELayer(spec, plan, router_weight=router, experts=experts, runner=runner, **shared)
    x = torch.randn(5, spec.hidden_size)
    wanted, found = layer(x), layer(x, adds_parts=True)
    assert set(runner.noted[: len(runner.noted) // 2]) == {False}
    assert set(runner.noted[len(runner.noted) // 2 :]) == {may}
    torch.testing.assert_close(found.sum(0) if may else found, wanted)


class Choosing(Noting):
    """A runner that chooses experts itself, and notes where it did."""

    def chooses(self) -> bool:
        return True

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch)
        self.noted.append(batch.choice is not None)
        if batch.choice is not None:
            choice, kind = batch.choice, "softmax_topk" if batch.choice.of_all else "topk_softmax"
            routing = Routing(kind=kind, renormalize=False, scaling_factor=choice.scaling)
            ids_1K, weights_1K = route(choice.logits_P1E.sum(0), routing, choice.top_k)
            assert batch.topk_ids.shape == batch.topk_weights.shape == ids_1K.shape
            if choice.real_1 is not None:
                weights_1K = weights_1K * choice.real_1
            batch = replace(batch, topk_ids=ids_1K, topk_weights=weights_1K, choice=None)
        return self.own(batch)


@pytest.mark.parametrize(
    ("may", "routing", "changed"),
    [
        (True, Routing(kind="topk_softmax", scaling_factor=2.0), {}),
        (True, Routing(renormalize=True), {}),
        (True, Routing(renormalize=False), {}),
        (False, Routing(kind="sigmoid_topk"), {}),
        (False, Routing(), {"first": 2, "count": 4}),
    ],
    ids=["chosen", "renormalised", "all", "sigmoid", "slice"],
)
def test_a_runner_chooses_only_for_one_token_of_a_softmax(may: bool, routing: Routing, changed: dict):
    spec = make_spec("swiglu", "bf16", routing=routing)
    plan = make_plan(spec, **changed)
    experts = expert_slice(make_experts(spec), plan.first_expert, plan.num_local_experts)
    runner = Choosing(RUNNERS.load("torch")(spec, plan, torch.device("cpu")))
    weight = torch.randn(spec.num_experts, spec.hidden_size)
    layer = MoELayer(spec, plan, router_weight=weight, experts=experts, runner=runner)
    x = torch.randn(1, spec.hidden_size)
    wanted = layer(x)
    by_softmax = routing.kind != "sigmoid_topk"
    layer._router._may_be_late = layer._router._may_be_late or by_softmax  # as its kernel on CUDA
    logits = x @ weight.T
    assert runner.noted == [False]
    found = layer(x, logits_PTE=torch.stack((logits / 2, logits / 2)) if may else logits)
    torch.testing.assert_close(found, wanted)
    assert runner.noted == [False, may]
    if may:
        none = layer(x, real_T=torch.tensor([False]), logits_PTE=logits[None])
        assert not none.any()
    layer(torch.randn(2, spec.hidden_size), logits_PTE=torch.randn(2, spec.num_experts))
    assert not runner.noted[-1]


def test_deepseek_v3_with_its_shared_expert():
    """The scaling factor applies to routed experts only, once; the shared expert is added once."""
    theirs = block(
        DeepseekV3MoE,
        "deepseek_v3",
        n_routed_experts=E,
        moe_intermediate_size=I,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    routing = Routing(kind="sigmoid_topk", n_group=4, topk_group=2, scaling_factor=2.5)
    spec = spec_of(routing)
    layer = MoELayer(
        spec,
        make_plan(spec),
        router_weight=theirs.gate.weight,
        correction_bias=theirs.gate.e_score_correction_bias,
        experts=stacked(theirs.experts.gate_up_proj, theirs.experts.down_proj),
        shared_expert=theirs.shared_experts,
    )
    assert_same(layer, theirs)


def test_gpt_oss_with_clamp_and_biases():
    theirs = block(GptOssMLP, "gpt_oss", num_local_experts=E, intermediate_size=I, swiglu_limit=0.8)
    ours = theirs.experts
    rows = ours.gate_up_proj.transpose(1, 2)  # gate and up rows alternate
    weights = stacked(
        torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1),
        ours.down_proj.transpose(1, 2),
        b13=torch.cat((ours.gate_up_proj_bias[:, 0::2], ours.gate_up_proj_bias[:, 1::2]), dim=1),
        b2=ours.down_proj_bias,
    )
    activation = replace(ACTIVATIONS["swiglu"], limit=0.8)
    spec = spec_of(Routing(kind="topk_softmax"), activation=activation, expert_bias=True)
    layer = MoELayer(
        spec,
        make_plan(spec),
        router_weight=theirs.router.weight,
        router_bias=theirs.router.bias,
        experts=weights,
    )
    assert_same(layer, lambda x: theirs(x)[0])


def make_layer(spec: MoESpec, experts: ExpertWeights, *, topology: Topology = Topology(), **fields):
    router = torch.randn(spec.num_experts, spec.hidden_size, generator=torch.Generator().manual_seed(9))
    span = {"first": experts.first_expert, "count": experts.num_local_experts}
    return MoELayer(
        spec,
        make_plan(spec, **span),
        router_weight=router,
        experts=experts,
        groups=Groups(topology=topology),
        **fields,
    )


class Doubled:
    """A shared expert that adds itself to rows by parts."""

    adds_row = True

    def __call__(self, x):
        return 2 * x

    def begin_row(self, x):
        return lambda more: torch.stack((more, 2 * x))


def test_a_shared_expert_may_add_itself_to_a_row_whose_logits_are_known():
    """Then the result is what it gives, parts; else the layer adds."""
    spec, experts = make_spec("swiglu"), make_experts(make_spec("swiglu"))
    layer, plain = make_layer(spec, experts, shared_expert=Doubled()), make_layer(spec, experts)
    x = torch.randn(2, spec.hidden_size)
    assert torch.equal(layer(x), plain(x) + 2 * x)
    logits = x @ layer._router_weight.T
    parts = layer(x[:1], "decode", None, None, logits[:1])
    assert parts.shape == (2, 1, spec.hidden_size)
    assert relative_error(parts.sum(0), plain(x)[:1] + 2 * x[:1]) < 1e-5
    assert layer(x, "decode", None, None, logits).shape == x.shape


def test_expert_parallel_slices_in_one_process():
    spec = make_spec("swiglu", "nvfp4")
    experts = make_experts(spec)
    x = torch.randn(9, spec.hidden_size)
    parts = [make_layer(spec, expert_slice(experts, first, 2))(x) for first in range(0, 8, 2)]
    assert relative_error(torch.stack(parts).sum(0), make_layer(spec, experts)(x)) < 1e-5


def test_shards_of_experts_add_the_down_bias_once():
    spec = make_spec("swiglu")
    experts = make_experts(spec)
    half = spec.intermediate_size // 2
    gate, up = experts.w13.data.chunk(2, dim=1)
    bias_gate, bias_up = experts.b13.chunk(2, dim=1)
    parts = []
    x = torch.randn(9, spec.hidden_size)
    for rank in range(2):
        cut = slice(rank * half, (rank + 1) * half)
        shard = replace(
            experts,
            w13=PackedTensor(format="bf16", data=torch.cat((gate[:, cut], up[:, cut]), dim=1)),
            w2=PackedTensor(format="bf16", data=experts.w2.data[:, :, cut].contiguous()),
            b13=torch.cat((bias_gate[:, cut], bias_up[:, cut]), dim=1),
        )
        parts.append(make_layer(spec, shard, topology=Topology(tp_size=2, rank=rank))(x))
    assert relative_error(parts[0] + parts[1], make_layer(spec, experts)(x)) < 1e-5


def test_counts_which_experts_were_chosen():
    spec = make_spec()
    layer = make_layer(spec, make_experts(spec))
    for tokens in (0, 5, 7):
        layer(torch.randn(tokens, spec.hidden_size), "decode")
    assert layer.expert_counts.shape == (spec.num_experts,)
    assert layer.expert_counts.sum() == 12 * spec.top_k
    layer.reset_counts()
    assert not layer.expert_counts.any()


def test_from_the_planner_to_the_result():
    """The three values that a caller needs: spec, plan, weights; float32 and bfloat16 agree."""
    spec = make_spec("silu", "mxfp4")
    budget = Budget.from_limits(chunked_prefill_size=64, max_prefill_tokens=64, max_running_requests=8)
    x = torch.randn(5, spec.hidden_size)
    router = torch.randn(spec.num_experts, spec.hidden_size)
    out = []
    for dtype in ("float32", "bfloat16"):
        chosen = plan(
            spec,
            topology=Topology(),
            budget=budget,
            hardware=hardware.named("cpu"),
            compute_dtype=dtype,
        )
        layer = MoELayer(spec, chosen, router_weight=router, experts=make_experts(spec))
        out.append(layer(x.to(getattr(torch, dtype)).float() if dtype == "float32" else x.bfloat16()))
    assert out[1].dtype == torch.bfloat16
    assert relative_error(out[1], out[0]) < 2e-2


def test_weights_of_other_experts_are_refused():
    spec = make_spec()
    with pytest.raises(ValueError, match=r"experts 4 \+ 4, but the plan is for 0 \+ 8"):
        MoELayer(
            spec,
            make_plan(spec),
            router_weight=torch.randn(spec.num_experts, spec.hidden_size),
            experts=expert_slice(make_experts(spec), 4, 4),
        )
