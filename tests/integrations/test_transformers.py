"""experts_implementation="turnout" against transformers' own implementations."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import turnout.integrations.transformers as integration
from tests.tiny import QWEN2_MOE, QWEN3_MOE
from turnout.errors import UserError

GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "eos_token_id": 257, "pad_token_id": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "max_position_embeddings": 512, "first_k_dense_replace": 1, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {"qwen3": QWEN3_MOE, "qwen2": QWEN2_MOE, "gpt-oss": GPT_OSS, "deepseek-v3": DEEPSEEK_V3}


def build(fields: dict, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "gate.weight" in name else 0.1))
    return model


@torch.no_grad()
def logits(model: nn.Module, implementation: str, ids: torch.Tensor) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    return model(ids).logits


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 384, (batch, length), generator=torch.Generator().manual_seed(batch + length))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager(family):
    model = build(FAMILIES[family])
    for ids in (tokens(3, 20), tokens(1, 1)):
        eager, ours = logits(model, "eager", ids), logits(model, "turnout", ids)
        assert eager.std() > 0.1
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4)


def test_generation_equals_eager():
    model = build(QWEN3_MOE)
    texts = []
    for implementation in ("eager", "turnout"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(tokens(2, 5), max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert texts[0].tolist() == texts[1].tolist()


def test_it_is_chosen_when_a_model_is_loaded(tmp_path):
    build(QWEN3_MOE).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="turnout")
    assert ALL_EXPERTS_FUNCTIONS["turnout"] is integration.experts_forward
    assert model.config._experts_implementation == "turnout"
    torch.testing.assert_close(
        logits(model, "turnout", tokens(1, 9)), logits(model, "eager", tokens(1, 9)), rtol=0, atol=1e-4
    )


def test_bfloat16():
    model = build(QWEN3_MOE, torch.bfloat16)
    ours, eager = logits(model, "turnout", tokens(2, 8)), logits(model, "eager", tokens(2, 8))
    assert ours.dtype == torch.bfloat16
    exact = logits(model.float(), "eager", tokens(2, 8))
    assert (ours.float() - exact).norm() <= 1.5 * (eager.float() - exact).norm()


class Variant(nn.Module):
    """Expert weights in the layout that the decorator names."""

    def __init__(
        self, config, *, gate: bool = True, transposed: bool = False, bias: bool = False, act=nn.SiLU()
    ):
        super().__init__()
        self.num_experts, H, I = 6, 24, 20
        draw = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=draw) * 0.2)

        N, first = (2 * I, "gate_up_proj") if gate else (I, "up_proj")
        setattr(self, first, parameter(6, H, N) if transposed else parameter(6, N, H))
        self.down_proj = parameter(6, I, H) if transposed else parameter(6, H, I)
        if bias:
            setattr(self, f"{first}_bias", parameter(6, N))
            self.down_proj_bias = parameter(6, H)
        self.act_fn = act

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("replaced by the implementation asked for")


class Interleaved(Variant):
    def _apply_gate(self, gate_up):
        return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


class Clamped(Variant):
    """As DeepSeek-V4 has it."""

    limit = 1.5

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def variant(base=Variant, *, concatenated=True, norm=False, **fields) -> nn.Module:
    decorate = use_experts_implementation(
        has_gate=fields.get("gate", True),
        is_transposed=fields.get("transposed", False),
        has_bias=fields.get("bias", False),
        is_concatenated=concatenated,
        **({"has_post_expert_norm": True} if norm else {}),  # older releases do not know it
    )
    config = AutoConfig.for_model("qwen3_moe")
    module = decorate(type("Decorated", (base,), {}))(config, **fields)
    return module.eval()


def routed(T: int = 17, k: int = 3, experts: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(T)
    ids = torch.rand(T, experts, generator=draw).topk(k).indices
    return torch.randn(T, 24, generator=draw), ids, torch.rand(T, k, generator=draw)


@torch.no_grad()
def run(module: nn.Module, implementation: str, *inputs: torch.Tensor) -> torch.Tensor:
    module.config._experts_implementation = implementation
    return module(*inputs)


@pytest.mark.parametrize(
    "module",
    [
        variant(),
        variant(transposed=True),
        variant(bias=True),
        variant(Interleaved, concatenated=False, transposed=True, bias=True),
        variant(Clamped),
        variant(gate=False, act=lambda x: x.relu() ** 2),
        variant(gate=False, bias=True, transposed=True, act=lambda x: x.relu() ** 2),
    ],
    ids=["plain", "transposed", "bias", "interleaved", "clamped", "not-gated", "not-gated-bias"],
)
def test_every_layout_of_weights(module):
    for T in (0, 1, 17):
        expected = run(module, "batched_mm", *routed(T))
        torch.testing.assert_close(run(module, "turnout", *routed(T)), expected, rtol=1e-5, atol=1e-5)


def test_experts_of_other_ranks_are_skipped():
    module = variant()
    x, ids, weights = routed()
    absent = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    absent[3] = True
    ids = ids.masked_fill(absent, module.num_experts)
    module._is_expert_parallel = True
    expected = run(module, "batched_mm", x, ids, weights.masked_fill(absent, 0))
    before = ids.clone()
    found = run(module, "turnout", x, ids, weights)  # even if their weights were left in place
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[3], torch.zeros(24))
    assert torch.equal(ids, before)


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "dtype"])
def test_changed_weights_are_taken_up(change):
    module = variant()
    old = run(module, "turnout", *routed())
    x, ids, weights = routed()
    with torch.no_grad():
        match change:
            case "in place":
                module.down_proj[2] *= 3
            case "replaced":
                module.gate_up_proj = nn.Parameter(module.gate_up_proj.flip(0))
            case "loaded":
                module.load_state_dict({name: w + 0.1 for name, w in module.state_dict().items()})
            case "dtype":
                module.bfloat16()
                x = x.bfloat16()
    new = run(module, "turnout", x, ids, weights)
    tolerance = 2e-2 if change == "dtype" else 1e-5
    expected = run(module, "batched_mm", x, ids, weights.to(x.dtype))
    torch.testing.assert_close(new, expected, rtol=tolerance, atol=tolerance)
    assert new.dtype == x.dtype
    assert not torch.equal(new.float(), old)


def test_weights_are_prepared_once_and_go_with_their_module(monkeypatch):
    made = []
    prepare = integration._prepare
    monkeypatch.setattr(integration, "_prepare", lambda *args: made.append(args) or prepare(*args))
    module = variant()
    for T in (1, 17, 1):
        run(module, "turnout", *routed(T))
    assert len(made) == 1
    run(copy.deepcopy(module), "turnout", *routed())
    assert len(made) == 2
    made.clear()
    gc.collect()
    before = len(integration._PREPARED)
    assert module in integration._PREPARED
    del module
    gc.collect()
    assert len(integration._PREPARED) == before - 1


def test_a_batch_beyond_the_plan_is_planned_for(monkeypatch):
    monkeypatch.setattr(integration, "FIRST_TOKENS", 4)
    module = variant()
    for T, planned in ((3, 4), (17, 32), (5, 32)):
        run(module, "turnout", *routed(T))
        assert integration._PREPARED[module].max_tokens == planned


def test_inference_mode_and_tensors_made_in_it():
    with torch.inference_mode():
        module = variant()
        ours = run(module, "turnout", *routed())
        torch.testing.assert_close(ours, run(module, "batched_mm", *routed()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(module, "turnout", *routed()), ours)


def test_training_fails_aloud():
    model = build(QWEN3_MOE)
    model.set_experts_implementation("turnout")
    loss = model(tokens(1, 6), labels=tokens(1, 6)).loss
    with pytest.raises(UserError, match="inference only"):
        loss.backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: variant(act=nn.GELU()), "an activation that Turnout does not compute"),
        (lambda: variant(Interleaved, concatenated=True), "an activation that Turnout does not compute"),
        (lambda: variant(gate=False, act=nn.ReLU()), "an activation that Turnout does not compute"),
        (lambda: variant(norm=True), "norms each expert's output"),
        (lambda: variant().double(), "Turnout takes unquantised weights here"),
    ],
    ids=["gelu", "misnamed-layout", "relu", "post-norm", "float64"],
)
def test_what_turnout_does_not_compute_is_refused(make, words):
    with pytest.raises(UserError, match=f"Decorated.*{words}.*eager"):
        run(make(), "turnout", *routed())


def test_hidden_states_in_a_type_it_does_not_compute_in():
    x, ids, weights = routed()
    with pytest.raises(UserError, match=r"float32, bfloat16, float16, not torch\.float64"):
        run(variant(), "turnout", x.double(), ids, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_a_gpu(family):
    model = build(FAMILIES[family], torch.bfloat16).cuda()
    ids = tokens(3, 20).cuda()
    ours, eager = logits(model, "turnout", ids), logits(model, "eager", ids)
    exact = logits(model.float(), "eager", ids)
    mine, theirs = ((y.float() - exact).norm() / exact.norm() for y in (ours, eager))
    # Either may round a router's close call the other way, which costs a few percent on so few tokens.
    assert mine <= 1.5 * theirs + 0.05, f"{mine:.3f} against eager's {theirs:.3f}"
