"""Configurations of every family: published ones plan without weights, and each field is read or refused."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.models.families import FAMILIES, random_model, release_config
from turnout.commands.plan import explain
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.llm import LLM
from turnout.errors import PlanRefused, UserError
from turnout.models import describe
from turnout.parallel.hardware import detect, named
from turnout.vocabulary import RoutingKind

PUBLISHED = Path(__file__).parent / "published"
SIZES = {  # billions of parameters of the text model as published, and GPUs that hold its weights
    "mixtral-8x7b": (46.7, 1),
    "mixtral-8x22b": (141, 4),
    "glm-4.5": (355, 8),
    "glm-4.5-air": (106, 4),
    "glm-4.6": (355, 8),
    "glm-4.7-fp8": (355, 8),
    "minimax-m2": (229, 4),
    "minimax-m2.7": (229, 4),
    "hy3": (295, 8),
    "gpt-oss-20b": (20.9, 1),
    "gpt-oss-120b": (116.8, 1),
    "qwen3-vl-30b-a3b": (30.5, 1),
    "qwen3-vl-235b-a22b": (235, 8),
    "qwen3-vl-235b-a22b-fp8": (235, 4),
    "qwen3-next-80b-a3b": (79.7, 2),
    "qwen3.5-35b-a3b": (34.7, 1),
    "qwen3.5-122b-a10b": (122, 4),
    "qwen3.5-397b-a17b": (397, 8),
    "qwen3.5-397b-a17b-nvfp4": (397, 4),
    "qwen3.6-35b-a3b-fp8": (34.7, 1),
    "llama-4-scout": (108, 4),
    "llama-4-maverick": (400, 8),
    "deepseek-v3": (671, 8),
    "deepseek-r1-nvfp4": (671, 8),
    "kimi-k2": (1026, 16),
    "kimi-k2-thinking": (1026, 8),
    "kimi-k2.5-bf16": (1026, 32),
    "moonlight-16b-a3b": (16, 1),
    "glm-4.7-flash": (30, 1),
    "deepseek-v3.2": (672, 8),
    "deepseek-v4-flash": (284, 4),
    "deepseek-v4-pro": (1573, 16),  # and 26 of its draft stage, published as 1.6 T together
    "glm-5": (744, 16),
    "glm-5.2": (743, 16),
}


def published(name: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


def plan(name: str, hardware: str, **flags: Any) -> tuple[int, str]:
    """(exit code, what was printed)."""
    out = io.StringIO()
    config = Config(model=str(PUBLISHED / f"{name}.json"), **flags)
    console = Console(file=out, width=200)
    return explain(config, hardware=hardware, as_json=False, console=console), out.getvalue()


QUICK = (
    "mixtral-8x22b",
    "glm-4.6",
    "minimax-m2",
    "qwen3-vl-30b-a3b",
    "qwen3.5-35b-a3b",
    "glm-4.7-flash",
)  # planned in make test


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        pytest.param(hardware, name, marks=[] if hardware == "h200" and name in QUICK else pytest.mark.more)
        for hardware in ("h200", "b200")
        for name in SIZES
    ],
)
def test_published_configurations_plan(hardware: str, name: str) -> None:
    size = SIZES[name][1]
    code, text = plan(name, hardware, tp_size=size, ep_size=size)
    assert code == 0, text
    assert published(name)["architectures"][0] in text


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in SIZES if SIZES[name][1] > 1])
@pytest.mark.parametrize("hardware", ["h200", "b200"])
def test_published_configurations_plan_with_data_parallel_attention(hardware: str, name: str) -> None:
    size = SIZES[name][1]
    code, text = plan(name, hardware, tp_size=size, ep_size=size, dp_size=size // 2, enable_dp_attention=True)
    assert code == 0, text


WIDE = {"tp_size": 8, "dp_size": 8, "ep_size": 8, "enable_dp_attention": True}


@pytest.mark.more
def test_plans_of_sparse_attention_count_index_keys() -> None:
    """Of a token: latent vectors in all layers, and index keys of 128 where an indexer is."""
    wide = {"tp_size": 16, "dp_size": 16, "ep_size": 16, "nnodes": 2, "enable_dp_attention": True}
    code, text = plan("glm-5.2", "b200", **wide)
    assert code == 0, text
    full = [i for i in range(78) if i < 3 or (i - 2) % 4 == 0]
    assert f"{(78 * 576 + len(full) * 128) * 2:,}" in text
    told = (
        f"(512 + 64), 2048 of each context by keys of 128 that {len(full)} layers keep, in 78 layers: triton"
    )
    assert told in text
    code, text = plan("glm-5.2", "b200", index_cache_dtype="fp8", **wide)
    assert code == 0, text
    assert f"{78 * 576 * 2 + len(full) * (128 + 4):,}" in text
    assert f"by keys of 128 in FP8 that {len(full)} layers keep" in text
    shapes = describe(published("glm-5.2")).shape.attention
    assert [i for i, layer in enumerate(shapes) if not layer.shares_choice] == full


V3_LAYER = {"kept": 1536 * 24576 + 16384 * 7168 + 576 * 7168, "decoded": 512 * 128 * 256}
KIMI_LAYER = {"kept": 1536 * 12288 + 8192 * 7168 + 576 * 7168, "decoded": 512 * 64 * 256}


@pytest.mark.parametrize(
    ("name", "hardware", "ranks", "layer", "head", "dense"),
    [
        ("deepseek-v3", "h200", 8, V3_LAYER, 129280, 3),
        ("deepseek-v3", "h100", 16, V3_LAYER, 129280, 3),
        ("kimi-k2", "b200", 8, KIMI_LAYER, 163840, 1),
    ],
)
def test_plans_know_what_dense_weights_are(
    name: str, hardware: str, ranks: int, layer: dict[str, int], head: int, dense: int
) -> None:
    """Under data-parallel attention all of them are whole on each rank, the head too."""
    sizes = {"tp_size": ranks, "dp_size": ranks, "ep_size": ranks, "nnodes": ranks // 8}
    flags = sizes | {"enable_dp_attention": True, "enable_dp_lm_head": True, "mem_fraction_static": 0.9}
    config = Config(model=str(PUBLISHED / f"{name}.json"), **flags)
    planned = resolve(config, named(hardware))
    parts, scale = planned.describe()["dense_parts"], 4 / 128  # of each FP8 value: a scale for 128 of a row
    projections = 61 * (layer["kept"] * (1 + scale) + layer["decoded"] * 2)
    assert parts["queries"] + parts["keys_values"] == projections
    assert parts["vocabulary"] == 2 * 2 * 7168 * head
    assert parts["mlps"] == dense * 3 * 7168 * 18432 * (1 + scale)
    assert parts["shared_experts"] == (61 - dense) * 3 * 7168 * 2048 * (1 + scale)
    assert sum(parts.values()) == planned.memory.dense
    # Where ranks share requests they divide the head, and with it the embedding.
    pairs = replace(config, dp_size=ranks // 2, moe_dense_tp_size=1)
    halves = resolve(pairs, named(hardware)).describe()["dense_parts"]
    assert halves["vocabulary"] == 2 * 7168 * head
    assert halves["mlps"] == parts["mlps"]


def test_plans_say_what_dense_weights_are() -> None:
    code, text = plan("glm-4.7-flash", "h200", tp_size=2)
    assert code == 0, text
    rows = re.findall(r"^│ ([^│]+?) *│ +([\d,]+) │", text, re.M)
    found = {name: int(size.replace(",", "")) for name, size in rows}
    parts = [name for name in found if name.startswith("  ")]
    assert parts[0] == "  embedding, head (77,440 rows)"
    assert found[parts[0]] == 2 * 2 * 2048 * 154880 // 2
    assert sum(found[part] for part in parts) == found["dense weights"]


def test_plans_of_latent_attention_count_what_every_rank_holds_whole() -> None:
    """Dense weights and latent vectors are those of the model on each of eight ranks, experts an eighth."""
    code, text = plan("deepseek-r1-nvfp4", "b200", **WIDE)
    assert code == 0, text
    assert "70,272" in text  # bytes of a token: 61 layers x 576 values of bfloat16
    assert "34,448,187,392" in text  # 17.1 billion parameters, and routers in float32
    assert "of latent vectors (512 + 64) in 61 layers: triton" in text


@pytest.mark.more
def test_models_with_latent_attention_that_do_not_fit_are_refused_with_remedies() -> None:
    code, text = plan("deepseek-v3", "h200", mem_fraction_static=0.7, **WIDE)
    assert code == 2
    # Of 34.4 GB in bfloat16, what the release has in FP8 stays in it.
    assert "dense weights 20.8 GB, experts 81.8 GB, attention workspace" in text
    assert "raise --mem-fraction-static to" in text
    assert plan("deepseek-v3", "h200", **WIDE)[0] == 0
    code, text = plan("kimi-k2", "h200", **WIDE)
    assert code == 2
    assert "divide the model among more ranks (--tp-size)" in text


def test_deepseek_v3_runs_on_16_h100_with_steps_of_few_prompt_tokens() -> None:
    """Chosen where the usual ones do not fit; those that are asked for are refused."""
    flags = {"tp_size": 16, "dp_size": 16, "ep_size": 16, "nnodes": 2, "enable_dp_attention": True}
    code, text = plan("deepseek-v3", "h100", **flags)
    assert code == 0, text
    assert "--max-prefill-tokens 512: the plan refuses more: the model does not fit in memory" in text
    (tokens,) = re.findall(r"│ KV cache +│ +([\d,]+) │", text)
    assert int(tokens.replace(",", "")) > 50_000
    code, text = plan("deepseek-v3", "h100", max_prefill_tokens=2048, **flags)
    assert code == 2
    assert re.search(r"lower\s+--max-prefill-tokens and --chunked-prefill-size to \d+", text)


@pytest.mark.parametrize("name", SIZES)
def test_published_configurations_have_their_published_size(name: str) -> None:
    description = describe(published(name))
    moe = description.moe
    experts = len(description.moe_layers) * moe.num_experts * 3 * moe.hidden_size * moe.intermediate_size
    assert (description.dense.total + experts) / 1e9 == pytest.approx(SIZES[name][0], rel=0.01)


@pytest.mark.parametrize("name", FAMILIES)
def test_structure_equals_transformers(name: str) -> None:
    """Parameters and the buffers that are saved; of a vision model those of its text part."""
    model = random_model(FAMILIES[name])
    description = describe(release_config(FAMILIES[name], model))
    text = {n: t for n, t in model.state_dict().items() if "visual" not in n and "vision" not in n}
    text = {n: t for n, t in text.items() if "multi_modal" not in n and "mm_projector" not in n}
    if model.config.tie_word_embeddings:
        del text["lm_head.weight"]
    experts = {n: t for n, t in text.items() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    text = {n: t for n, t in text.items() if not n.endswith("_proj_bias")}  # of experts
    assert description.dense.total == sum(t.numel() for n, t in text.items() if n not in experts)
    moe = description.moe
    routers = [t for n, t in text.items() if n.endswith(("gate.weight", "e_score_correction_bias"))]
    sigmoid = moe.routing.kind == RoutingKind.SIGMOID_TOPK and not moe.routing.on_input
    wide = routers if sigmoid else []
    wide += [t for n, t in text.items() if n.endswith("indexer.weights_proj.weight")]
    if name == "deepseek_v4":
        wide = routers + [t for n, t in text.items() if "_hc." in n or ".hc_" in n or "tid2eid" in n]
    if FAMILIES[name].norms_around_one:
        wide = [t for n, t in text.items() if "norm" in n and not n.endswith("linear_attn.norm.weight")]
        wide += [t for n, t in text.items() if n.endswith(("A_log", "dt_bias"))]
    assert description.dense.in_float32 == sum(t.numel() for t in wide)
    routed = len(description.moe_layers) * moe.num_experts * 3 * moe.hidden_size * moe.intermediate_size
    assert routed == sum(t.numel() for t in experts.values())


def test_values() -> None:
    glm, minimax, hy3 = (describe(published(name)) for name in ("glm-4.6", "minimax-m2", "hy3"))
    assert glm.moe_layers == tuple(range(3, 92))
    assert (glm.moe.routing.kind, glm.moe.routing.scaling_factor) == ("sigmoid_topk", 2.5)
    assert (minimax.moe.routing.kind, minimax.moe.routing.scaling_factor) == ("sigmoid_topk", 1.0)
    assert minimax.moe.format == "fp8"
    assert hy3.moe.routing.scaling_factor == 2.826
    deepseek, kimi, flash = (
        describe(published(name)) for name in ("deepseek-v3", "kimi-k2", "glm-4.7-flash")
    )
    scales = [model.shape.attention[0].scale for model in (deepseek, kimi, flash)]
    assert scales == pytest.approx([192**-0.5 * 1.8739, 192**-0.5 * 1.8133, 256**-0.5], rel=1e-4)
    assert [model.moe.routing.n_group for model in (deepseek, kimi)] == [8, 1]
    assert deepseek.dense.total * 2 / 1e9 == pytest.approx(34.2, abs=0.05)
    per_token = [sum(layer.token_bytes(2) for layer in model.shape.attention) for model in (deepseek, flash)]
    assert per_token == [70272, 54144]
    assert flash.shape.attention[0].kind == "latent"
    maverick = describe(published("llama-4-maverick"))
    assert (maverick.moe_layers, maverick.moe.top_k) == (tuple(range(1, 48, 2)), 1)
    assert [layer.rope for layer in maverick.shape.attention[:5]] == [*["default"] * 3, "none", "default"]


# By published configuration: a field (in text_config where there is one), its value, what the refusal says.
REFUSED = {
    "mixtral-8x7b": [
        ("sliding_window", "4096", "sliding_window = '4096': must be an integer"),
        ("layer_types", ["chunked_attention"] * 32, "'chunked_attention' is not implemented"),
        ("num_local_experts", None, "num_local_experts is missing"),
        ("num_experts_per_tok", 9, "num_experts_per_tok = 9: must not exceed the number of experts (8)"),
        ("hidden_act", "gelu", "hidden_act = 'gelu': is not implemented"),
        ("attention_bias", True, "could change the result: attention_bias = True"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5"),
        ("intermediate_size", 0, "intermediate_size = 0"),
    ],
    "glm-4.6": [
        ("n_group", 3, "n_group = 3: must divide the number of experts (160)"),
        ("topk_group", 2, "topk_group = 2: must not exceed n_group (1)"),
        ("first_k_dense_replace", 92, "first_k_dense_replace = 92: leaves none of the 92 layers"),
        ("first_k_dense_replace", -1, "first_k_dense_replace = -1"),
        ("intermediate_size", None, "intermediate_size = None: must be the size of the layers"),
        ("partial_rotary_factor", 2.0, "partial_rotary_factor = 2 rotates 256 of the 128 dimensions"),
        ("partial_rotary_factor", 0.01, "partial_rotary_factor = 0.01 rotates 1 of the 128 dimensions"),
        ("scoring_func", "softmax", "scoring_func = 'softmax': is not implemented"),
        ("topk_method", "greedy", "topk_method = 'greedy': is not implemented"),
        ("routed_scaling_factor", 0, "routed_scaling_factor = 0"),
        ("use_qk_norm", "yes", "use_qk_norm = 'yes': must be true or false"),
        ("mlp_layer_types", ["sparse"] * 92, "mlp_layer_types = "),
        ("mlp_layer_types", ["odd"] * 92, "must say 'dense' or 'sparse' of 92 layers"),
        ("num_nextn_predict_layers", -1, "num_nextn_predict_layers = -1"),
        ("logit_scale", 2.0, "logit_scale = 2.0"),
    ],
    "minimax-m2": [
        ("attn_type_list", [1] * 61 + [0], "attn_type_list = "),
        ("attn_type_list", [1], "must be 62 times 1"),
        ("shared_intermediate_size", 1024, "could change the result: shared_intermediate_size = 1024"),
        ("qk_norm_type", "per_head", "qk_norm_type = 'per_head': is not implemented"),
        ("use_qk_norm", False, "use_qk_norm = False: is not implemented"),
        ("use_routing_bias", False, "use_routing_bias = False: is not implemented"),
        ("scoring_func", "softmax", "scoring_func = 'softmax'"),
        ("rotary_dim", 256, "rotary_dim = 256: must not exceed head_dim (128)"),
        ("rotary_dim", 63, "rotates 63 of the 128 dimensions"),
    ],
    "hy3": [
        ("qk_norm", False, "qk_norm = False: is not implemented"),
        ("route_norm", False, "route_norm = False"),
        ("moe_router_use_sigmoid", False, "moe_router_use_sigmoid = False"),
        ("moe_router_enable_expert_bias", False, "moe_router_enable_expert_bias = False"),
        ("mlp_bias", True, "mlp_bias = True"),
        ("expert_hidden_dim", 1024, "expert_hidden_dim = 1024: contradicts moe_intermediate_size (1536)"),
        ("num_shared_experts", 0, "num_shared_experts = 0"),
    ],
    "gpt-oss-20b": [
        ("layer_types", ["chunked_attention"] * 24, "layer_types = .*'chunked_attention' is not implemented"),
        ("layer_types", ["full_attention"], "must be a list of 24 kinds, one for each layer"),
        ("sliding_window", None, "sliding_window is missing"),
        ("sliding_window", 0, "sliding_window = 0"),
        ("attention_bias", False, "attention_bias = False: is not implemented"),
        ("rope_scaling", None, "rope_scaling = None: must be given"),
        ("rope_scaling", {"rope_type": "ntk"}, "rope_type 'ntk' is not implemented"),
        ("hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("experts_per_token", 2, "experts_per_token = 2: contradicts num_experts_per_tok (4)"),
        ("swiglu_limit", -1, "swiglu_limit = -1"),
        ("num_experts_per_tok", 64, "must not exceed the number of experts (32)"),
        ("num_nextn_predict_layers", 1, "could change the result: num_nextn_predict_layers = 1"),
    ],
    "qwen3-vl-30b-a3b": [
        ("norm_topk_prob", False, "config.json: text_config: norm_topk_prob = False: is not implemented"),
        ("num_experts", None, "config.json: text_config: num_experts is missing"),
        ("shared_expert_intermediate_size", 8, "text_config: not implemented, and could change the result"),
        ("mlp_only_layers", list(range(48)), "none of the 48 layers is an MoE layer"),
        ("rope_scaling", {"rope_type": "odd"}, "rope_type 'odd' is not implemented"),
    ],
    "qwen3.5-35b-a3b": [
        ("attn_output_gate", False, "text_config: attn_output_gate = False: is not implemented"),
        ("attention_bias", True, "attention_bias = True: is not implemented"),
        ("layer_types", ["linear_attention"] * 40, "a model without a layer of full_attention"),
        ("layer_types", ["mamba"] * 40, "layer_types = .*'mamba' is not implemented; only linear_attention"),
        ("layer_types", ["full_attention"], "must be a list of 40 kinds, one for each layer"),
        ("linear_num_value_heads", 24, "linear_num_value_heads = 24: must be a multiple of key heads (16)"),
        ("linear_num_key_heads", None, "linear_num_key_heads is missing"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim = 1: must be an integer of at least 2"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype = 'bfloat16': is not implemented"),
        ("norm_topk_prob", False, "norm_topk_prob = False: is not implemented"),
        ("mlp_only_layers", list(range(40)), "none of the 40 layers is an MoE layer"),
    ],
    "qwen3-next-80b-a3b": [
        ("use_sliding_window", True, "use_sliding_window = True: is not implemented"),
        ("full_attention_interval", 0, "full_attention_interval = 0"),
        ("partial_rotary_factor", 0.001, "partial_rotary_factor = 0.001 rotates 0 of the 256 dimensions"),
        ("linear_num_value_heads", 8, "must be a multiple of key heads (16)"),
        ("shared_expert_intermediate_size", None, "shared_expert_intermediate_size is missing"),
    ],
    "llama-4-scout": [
        ("num_experts_per_tok", 2, "num_experts_per_tok = 2: is not implemented; only 1 is"),
        ("layer_types", ["sliding_attention"] * 48, "layer_types = .*'sliding_attention' is not implemented"),
        ("no_rope_layers", [1], "no_rope_layers = [1]: must have an entry for each of the 48 layers"),
        ("moe_layers", [48], "moe_layers = [48]: must name at least one of the 48 layers"),
        ("interleave_moe_layer_step", 49, "interleave_moe_layer_step = 49"),
        ("attn_temperature_tuning", "yes", "attn_temperature_tuning = 'yes'"),
        ("floor_scale", 1, "floor_scale = 1"),
        ("intermediate_size_mlp", "x", "intermediate_size_mlp = 'x'"),
    ],
}
MLA = [  # of all families with latent attention
    ("scoring_func", "softmax", "scoring_func = 'softmax': is not implemented"),
    ("topk_method", "group_limited_greedy", "topk_method = 'group_limited_greedy': is not implemented"),
    ("moe_layer_freq", 2, "moe_layer_freq = 2: is not implemented; only 1 is"),
    ("rope_interleave", False, "rope_interleave = False: is not implemented"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5: is not implemented"),
    ("attention_bias", True, "attention_bias = True: is not implemented"),
    ("kv_lora_rank", None, "kv_lora_rank is missing"),
    ("kv_lora_rank", 0, "kv_lora_rank = 0: must be an integer of at least 1"),
    ("q_lora_rank", "x", "q_lora_rank = 'x': must be an integer"),
    ("qk_rope_head_dim", 63, "head_dim = 63: rotary embedding needs an even head size"),
    ("qk_nope_head_dim", None, "qk_nope_head_dim is missing"),
    ("qk_head_dim", 99, "qk_head_dim = 99: contradicts qk_nope_head_dim + qk_rope_head_dim"),
    ("v_head_dim", -1, "v_head_dim = -1"),
    ("n_group", 7, "n_group = 7: must divide the number of experts"),
    ("topk_group", 9, "topk_group = 9: must not exceed n_group"),
    ("n_routed_experts", None, "n_routed_experts is missing"),
    ("hidden_act", "gelu", "hidden_act = 'gelu'"),
    ("index_topk", 2048, "could change the result: index_topk = 2048"),
]
REFUSED |= dict.fromkeys(("deepseek-v3", "moonlight-16b-a3b", "glm-4.7-flash", "kimi-k2.5-bf16"), MLA)
SPARSE = [case for case in MLA if case[0] not in ("index_topk", "q_lora_rank")] + [
    ("q_lora_rank", None, "q_lora_rank is missing"),
    ("index_topk", None, "index_topk is missing"),
    ("index_topk", 0, "index_topk = 0: must be an integer of at least 1"),
    ("index_n_heads", "x", "index_n_heads = 'x'"),
    ("index_head_dim", 32, "index_head_dim = 32: must be at least qk_rope_head_dim (64)"),
]
REFUSED["deepseek-v3.2"] = [
    *SPARSE,
    ("indexer_rope_interleave", True, "indexer_rope_interleave = True: is not implemented; only False is"),
    ("index_topk_freq", 4, "could change the result: index_topk_freq = 4"),
]
REFUSED["glm-5"] = [
    *SPARSE,
    ("indexer_rope_interleave", False, "indexer_rope_interleave = False: is not implemented; only True is"),
    ("index_topk_freq", 0, "index_topk_freq = 0"),
    ("index_topk_pattern", "FFS", "index_topk_pattern = 'FFS': must say 'full' or 'shared'"),
    ("index_topk_pattern", "FX" * 39, "must say 'full' or 'shared' (F or S) of 78 layers"),
    ("indexer_types", 78, "indexer_types = 78: must say 'full' or 'shared'"),
    ("indexer_types", ["shared"] * 78, "must begin with a full layer"),
]
REFUSED["kimi-k2"] = [
    ("rope_scaling", {"type": "yarn", "mscale_all_dim": "x"}, "mscale_all_dim = 'x'"),
    ("rope_scaling", {"type": "su"}, "rope_type 'su' is not implemented"),
    ("first_k_dense_replace", 61, "first_k_dense_replace = 61: leaves none of the 61 layers"),
]
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "field", "value", "message"), CASES)
def test_refused_by_name(name: str, field: str, value: object, message: str) -> None:
    config = published(name)
    config.get("text_config", config)[field] = value
    told = refusal(config)
    first, _, rest = message.partition(".*")
    assert first in told
    assert rest in told


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        describe(config)
    return str(error.value)


@pytest.mark.parametrize("name", SIZES)
def test_every_field_is_read_or_harmless(name: str) -> None:
    """A field that nothing knows is refused by name, at each level."""
    config = published(name)
    levels = [config] + ([config["text_config"]] if "text_config" in config else [])
    for level in levels:
        level["attn_logit_softcapping"] = 30.0
        assert "attn_logit_softcapping = 30.0" in refusal(copy.deepcopy(config))
        del level["attn_logit_softcapping"]
    describe(config)


@pytest.mark.parametrize("name", ["qwen3-vl-30b-a3b", "qwen3.5-35b-a3b", "llama-4-scout"])
def test_a_nested_configuration_needs_its_text_part(name: str) -> None:
    assert "text_config is missing" in refusal({**published(name), "text_config": None})
    assert "text_config = 'x': must be an object" in refusal({**published(name), "text_config": "x"})


def test_contexts_of_llama_4_end_with_the_attention_chunk() -> None:
    config = published("llama-4-scout")
    text = config["text_config"]
    assert describe(config).shape.max_position_embeddings == 8191  # the next query would be scaled
    text["attn_temperature_tuning"] = False
    assert describe(config).shape.max_position_embeddings == 8192
    text["attention_chunk_size"] = 128
    assert describe(config).shape.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("name", "hardware", "ranks", "megabytes", "token"),
    [
        # Keys and values of 2 heads of 256, in every fourth layer; one head where ranks share them.
        ("qwen3.5-35b-a3b", "h200", 1, 64.4, 10 * 2 * 2 * 256 * 2),
        ("qwen3.5-397b-a17b-nvfp4", "b200", 4, 48.0, 15 * 2 * 1 * 256 * 2),
        ("qwen3.5-397b-a17b-nvfp4", "h200", 8, 24.0, 15 * 2 * 1 * 256 * 2),
    ],
)
def test_plans_say_what_states_and_tokens_take(
    name: str, hardware: str, ranks: int, megabytes: float, token: int
) -> None:
    code, text = plan(name, hardware, tp_size=ranks, ep_size=ranks)
    assert code == 0, text
    rows = dict(re.findall(r"[│|] ([^│]+?) +│ +([\d,]+) │", text))
    each = int(rows["states per request"].replace(",", ""))
    assert each / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert int(rows["KV per token of context"].replace(",", "")) == token
    (running,) = {int(found) for found in re.findall(r"states \((\d+) running requests and 1 spare\)", text)}
    held = rows[f"states ({running} running requests and 1 spare)"]
    assert int(held.replace(",", "")) == (running + 1) * each
    assert "no prefix is reused: recurrent layers would need the state" in text
    # As many as it says fit, and not one more.
    most = int(rows["running requests (not tokens) whose states and logits would fit"].replace(",", ""))
    assert plan(name, hardware, tp_size=ranks, ep_size=ranks, max_running_requests=2 * most)[0] == 2


def test_a_draft_layer_left_out_of_quantisation_has_a_plan_of_its_own() -> None:
    name = "qwen3.5-397b-a17b-nvfp4"
    sizes = {"tp_size": 4, "ep_size": 4, "moe_activation_dtype": "nvfp4"}
    sizes |= {"dp_size": 4, "enable_dp_attention": True, "moe_a2a_backend": "nvlink"}
    code, text = plan(name, "b200", speculative_algorithm="MTP", **sizes)
    assert code == 0, text
    assert "the draft layer's experts are in bf16: runner " in text
    without, drafting = (
        resolve(
            Config(model=str(PUBLISHED / f"{name}.json"), speculative_algorithm=kind, **sizes), named("b200")
        )
        for kind in ("none", "MTP")
    )
    assert drafting.plan.activation_format == without.plan.activation_format == "nvfp4"
    # Tokens are sent in NVFP4 and in bfloat16, through buffers of their own.
    assert [part.prefill.wire_format for part in drafting.plan.parts] == ["nvfp4", "bf16"]
    assert drafting.memory.dispatch == sum(part.dispatch_bytes for part in drafting.plan.parts)
    alike = {"tp_size": 8, "dp_size": 8, "ep_size": 8, "moe_activation_dtype": "auto"}
    path = str(PUBLISHED / f"{name}.json")
    shared = resolve(Config(model=path, speculative_algorithm="MTP", **sizes | alike), named("h200"))
    assert shared.memory.dispatch == shared.plan.dispatch_bytes > 0
    assert drafting.memory.experts - without.memory.experts == 512 // 4 * 3 * 4096 * 1024 * 2


@pytest.mark.parametrize(
    ("name", "flags", "told"),
    [
        ("glm-4.7-flash", {"speculative_algorithm": "MTP"}, "decoding runs in CUDA graphs"),
        ("mixtral-8x7b", {"speculative_algorithm": "ngram"}, "decoding runs in CUDA graphs"),
        (
            "mixtral-8x7b",
            {"speculative_algorithm": "ngram", "deterministic": True},
            "decoding runs eagerly: --deterministic verifies drafts one after the other",
        ),
        (
            "qwen3.5-35b-a3b",
            {"speculative_algorithm": "MTP"},
            "decoding runs eagerly: drafts take the states of their requests one after the other",
        ),
    ],
)
def test_drafts_are_verified_in_graphs_where_nothing_keeps_states(
    name: str, flags: dict[str, Any], told: str
) -> None:
    code, text = plan(name, "h200", **flags)
    assert code == 0, text
    assert told in text


def test_what_states_do_not_permit_is_refused_by_name() -> None:
    name = "qwen3.5-35b-a3b"
    code, text = plan(name, "h200", speculative_algorithm="ngram", deterministic=True)
    assert code == 2
    assert "--speculative-algorithm ngram" in text
    assert "use --speculative-algorithm none" in text
    assert "--deterministic on CUDA" in text
    code, text = plan("qwen3-vl-30b-a3b", "h200", state_snapshot_interval=64)
    assert code == 2
    assert "none of its layers is recurrent or compresses" in text
    code, text = plan(name, "h200", max_running_requests=4000)
    assert code == 2
    assert re.search(r"states of 4000 requests 258 GB.*use --max-running-requests \d+ or less", text, re.S)
    code, text = plan(name, "h200", tp_size=32, nnodes=4)
    assert code == 2
    assert "16 key heads and 32 value heads of Gated DeltaNet, over 32 attention-TP ranks" in text


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """By `turnout plan` and at start, where all but the states of one request would fit; the remedy works."""
    flags = {"model": str(tmp_path), "device": "cpu", "max_running_requests": 1, "max_prefill_tokens": 64}
    least = 0.01  # of --mem-fraction-static
    config = published("qwen3.5-35b-a3b")
    sizes = {"hidden_size": 32, "num_experts": 8, "moe_intermediate_size": 16, "eos_token_id": None}
    text = config["text_config"] = config["text_config"] | sizes | {"layer_types": None}

    def planned(layers: int) -> tuple[int, int]:
        """(bytes of a request's state, of everything else)."""
        text["num_hidden_layers"] = layers
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = resolve(Config(**flags))
        rest = plan.memory.total - plan.memory.states - plan.memory.kv
        return plan.request_bytes, rest + sum(plan.group_bytes(1, plan.budget))

    available = least * detect("cpu").memory_bytes
    state, rest = planned(4 * max(1, round(available / (sum(planned(40)) / 40) / 4)))
    assert rest <= available < rest + 2 * state  # of the request, and a spare one
    out = io.StringIO()
    assert explain(Config(mem_fraction_static=least, **flags), console=Console(file=out, width=1000)) == 2
    assert "hold no state of a request" in out.getvalue()
    with pytest.raises(PlanRefused) as refused:
        LLM(mem_fraction_static=least, **flags)
    (refusal,) = refused.value.refusals
    assert "states of 1 request " in refusal.asked
    assert "which next to the rest hold no state of a request" in refusal.limit
    (enough,) = re.findall(r"raise --mem-fraction-static to ([\d.]+) or more", refusal.remedy)
    assert explain(Config(mem_fraction_static=float(enough), **flags), console=Console(file=out)) == 0


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_windows_take_little_next_to_whole_contexts(name: str, tmp_path: Path) -> None:
    """32 requests of 32k tokens, against the same layers with no windows."""
    config, tokens = published(name), 32 * 32768
    layers = config["num_hidden_layers"]
    flags = {"max_running_requests": 32, "context_length": 32768, "max_total_tokens": tokens}
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"] * layers}))
    whole = resolve(Config(model=str(tmp_path), **flags), named("b200"))
    assert whole.memory.kv == tokens * layers * 2 * 8 * 64 * 2
    windows = resolve(Config(model=str(PUBLISHED / f"{name}.json"), **flags), named("b200"))
    assert 0.5 < windows.memory.kv / whole.memory.kv <= 0.56
    full, sliding = windows.describe()["kv"]["groups"]
    assert (full["window"], sliding["window"]) == (0, 128)
    assert full["layers"] == sliding["layers"] == layers // 2
    assert full["num_pages"] * 16 == tokens
    assert full["bytes"] + sliding["bytes"] == windows.memory.kv
    code, text = plan(name, "b200", **flags)
    assert code == 0
    assert f"{sliding['bytes']:,}" in text
    assert f"KV cache ({sliding['num_pages']} pages of 16 tokens, {layers // 2} layers of window 128)" in text


def test_cache_groups_of_compressed_attention_are_told_apart() -> None:
    """21 layers keep 1024 + 256 bytes of each 4 tokens, 20 layers 1024 of each 128."""
    code, printed = plan(
        "deepseek-v4-flash", "h200", tp_size=4, dp_size=4, ep_size=4, enable_dp_attention=True, page_size=128
    )
    assert code == 0
    found = re.findall(
        r"KV cache \((\d+) pages of 128 tokens, (\d+) layers with entries of (\d+) tokens\)\D*([\d,]+)",
        printed,
    )
    bytes_per_page = {
        (int(layers), int(rate)): int(size.replace(",", "")) // int(pages)
        for pages, layers, rate, size in found
    }
    assert bytes_per_page == {(21, 4): 21 * 32 * 1280, (20, 128): 20 * 1024}
    assert re.search(r"KV per token of context\D*6,880", printed)


def test_pages_shorter_than_windows_of_compressed_attention_are_counted_and_said() -> None:
    """Each of 20 layers has an entry of 1024 bytes in every page, so for 16 tokens instead of 128."""
    code, printed = plan(
        "deepseek-v4-flash", "h200", tp_size=4, dp_size=4, ep_size=4, enable_dp_attention=True, page_size=16
    )
    assert code == 0
    assert "whose pages of 16 tokens take 8 times the memory of --page-size 128" in printed
    assert re.search(r"KV per token of context\D*8,000", printed)  # 6,880 - 20 * 8 + 20 * 64


@pytest.mark.parametrize(
    ("name", "ranks", "token", "request_bytes"),
    [
        # Pages of 16 tokens hold 4 entries of 1024 + 256 bytes, or one of 1024.
        ("deepseek-v4-pro", 16, 30 * 1280 // 4 + 31 * 1024 // 16, 61 * 131_072 + 30 * 40_960 + 31 * 262_144),
        ("deepseek-v4-flash", 4, 21 * 1280 // 4 + 20 * 1024 // 16, 43 * 131_072 + 21 * 40_960 + 20 * 262_144),
        ("deepseek-v4-flash", 8, 21 * 1280 // 4 + 20 * 1024 // 16, 43 * 131_072 + 21 * 40_960 + 20 * 262_144),
        ("deepseek-v3.2", 8, 61 * 2 * (512 + 64 + 128), 0),
    ],
)
def test_large_models_are_planned_with_no_flag_but_their_ranks(
    name: str, ranks: int, token: int, request_bytes: int
) -> None:
    """What a token and a request take, and how many requests of each length that leaves room for."""
    code, text = plan(name, "h200", tp_size=ranks)
    assert code == 0, text
    rows = re.findall(r"^│ ([^│]+?) *│ +([\d,]+) │", text, re.M)
    found = {what.strip(): int(size.replace(",", "")) for what, size in rows}
    assert found["KV per token of context"] == token
    assert found.get("states per request", 0) == request_bytes
    cache = sum(size for what, size in found.items() if what.startswith("KV cache ("))
    most = int(re.findall(r"--max-running-requests (\d+):", text)[0])
    for tokens in (8192, 32768, 131072):
        assert found[f"{tokens:,}"] == min(most, cache // (token * tokens))
        assert found[f"{tokens:,}"] > 1


def test_a_refused_layout_of_deepseek_v4_comes_with_flags_that_work() -> None:
    code, text = plan("deepseek-v4-pro", "h200", tp_size=8)
    assert code == 2
    tokens, flags = re.findall(r"most KV cache, ([\d,]+) tokens in all: (.*)", text)[0]
    assert flags == "--no-enable-dp-attention"
    code, text = plan("deepseek-v4-pro", "h200", tp_size=8, enable_dp_attention=False)
    assert code == 0
    assert re.search(rf"│ KV cache +│ +{tokens} │", text)
