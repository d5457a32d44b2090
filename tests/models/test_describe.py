"""What `config.json` alone says, against transformers' model of it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.configs import QWEN2_A27B, QWEN3_30B, QWEN3_CODER, empty_model, tiny
from turnout.errors import UserError
from turnout.models import describe
from turnout.registry import ARCHITECTURES

STRUCTURES = {
    "qwen3": tiny("qwen3"),
    "qwen3 biased, tied": tiny("qwen3", attention_bias=True, tie_word_embeddings=True),
    "qwen3 every second layer": tiny("qwen3", num_hidden_layers=5, decoder_sparse_step=2),
    "qwen3 some dense": tiny("qwen3", num_hidden_layers=5, mlp_only_layers=[0, 3]),
    "qwen3 wide heads": tiny("qwen3", head_dim=48),
    "qwen2": tiny("qwen2"),
    "qwen2 plain": tiny("qwen2", qkv_bias=False, tie_word_embeddings=True),
    "qwen2 some dense": tiny("qwen2", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1]),
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-Coder-30B-A3B": QWEN3_CODER,
    "Qwen1.5-MoE-A2.7B": QWEN2_A27B,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_equals_transformers(name: str) -> None:
    config = STRUCTURES[name]
    description, model = describe(config), empty_model(config)
    parameters = dict(model.named_parameters())  # a tied head is not listed again
    experts = {n for n in parameters if ".experts." in n}
    assert description.moe_layers == tuple(
        i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
    )
    assert description.dense.total == sum(p.numel() for n, p in parameters.items() if n not in experts)
    w13, w2 = (
        parameters[f"model.layers.{description.moe_layers[0]}.mlp.experts.{n}"]
        for n in ("gate_up_proj", "down_proj")
    )
    moe, shape = description.moe, description.shape
    assert w13.shape == (moe.num_experts, moe.w13_rows, moe.hidden_size)
    assert w2.shape == (moe.num_experts, moe.hidden_size, moe.intermediate_size)
    attention = model.model.layers[0].self_attn
    layer = shape.attention[0]
    assert attention.q_proj.out_features == layer.num_heads * layer.head_dim
    assert attention.k_proj.out_features == layer.num_kv_heads * layer.head_dim
    assert attention.head_dim == layer.head_dim
    assert (shape.vocab_size, shape.num_layers) == (model.vocab_size, len(model.model.layers))


def test_values() -> None:
    description = describe(QWEN3_30B)
    shape, moe = description.shape, description.moe
    assert shape.architecture == "Qwen3MoeForCausalLM"
    assert (shape.max_position_embeddings, shape.eos_token_ids) == (40960, (151645,))
    assert (moe.top_k, moe.routing.kind, moe.routing.renormalize) == (8, "softmax_topk", True)
    assert (moe.activation.kind, moe.expert_bias, moe.format) == ("silu", False, "bf16")
    assert describe(QWEN2_A27B).moe.routing.renormalize is False
    assert describe(QWEN3_30B | {"eos_token_id": [1, 2]}).shape.eos_token_ids == (1, 2)
    assert describe(QWEN3_30B | {"eos_token_id": None}).shape.eos_token_ids == ()


def test_the_model_cards_yarn_recipe_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert describe(QWEN3_30B | {"rope_scaling": scaling}).shape.max_position_embeddings == 131072


NVFP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, ("nvfp4", True)),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": NVFP4_GROUP, "input_activations": None}},
            },
            ("nvfp4", False),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, ("mxfp4", False)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", False)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.mlp.experts*"]}, ("bf16", False)),
        (None, ("bf16", False)),
    ],
)
def test_format_of_the_experts(quantization: dict | None, expected: tuple[str, bool]) -> None:
    moe = describe(QWEN3_30B | {"quantization_config": quantization}).moe
    assert (moe.format, moe.quantized_activations) == expected


def test_layers_that_differ_in_format_are_refused() -> None:
    record = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.7.mlp.experts*"]}
    with pytest.raises(UserError, match=r"layer 0 are nvfp4 and those of layer 7 are bf16"):
        describe(QWEN3_30B | {"quantization_config": record})


def refusal(config: dict) -> str:
    with pytest.raises(UserError) as error:
        describe(config)
    return str(error.value)


def test_an_unknown_architecture_is_told_what_could_run():
    told = refusal(QWEN3_30B | {"architectures": ["MambaForCausalLM"]})
    assert all(name in told for name in ARCHITECTURES)
    assert "Give a checkpoint whose config.json names one of these" in " ".join(told.split())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["MambaForCausalLM"], "unknown model architecture 'MambaForCausalLM'; known: "),
        ("architectures", ["Qwen3MoEForCausalLM"], "the most similar name is Qwen3MoeForCausalLM"),
        ("architectures", None, "architectures = None: must be a list that holds one name"),
        ("architectures", "Qwen3MoeForCausalLM", "must be a list"),
        ("architectures", ["Qwen3MoeForCausalLM", "Other"], "must be a list that holds one name"),
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", -2048, "hidden_size = -2048: must be an integer of at least 1"),
        ("hidden_size", 2048.0, "hidden_size = 2048.0: must be an integer"),
        ("hidden_size", "2048", "hidden_size = '2048'"),
        ("num_hidden_layers", True, "num_hidden_layers = True: must be an integer"),
        ("num_key_value_heads", 3, "num_key_value_heads = 3: must divide num_attention_heads (32)"),
        ("num_attention_heads", 0, "num_attention_heads = 0"),
        ("head_dim", 127, "head_dim = 127: rotary embedding needs an even head size"),
        ("num_experts", 0, "num_experts = 0"),
        ("num_experts", None, "num_experts is missing"),
        ("num_local_experts", 64, "num_experts = 128: contradicts num_local_experts (64)"),
        ("num_experts_per_tok", 129, "num_experts_per_tok = 129: must not exceed the number of experts"),
        ("moe_intermediate_size", None, "moe_intermediate_size is missing"),
        ("vocab_size", [], "vocab_size = []"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps = inf"),
        ("norm_topk_prob", "yes", "norm_topk_prob = 'yes': must be true or false"),
        ("tie_word_embeddings", 1, "tie_word_embeddings = 1: must be true or false"),
        ("decoder_sparse_step", 0, "decoder_sparse_step = 0"),
        ("decoder_sparse_step", 49, "none of the 48 layers is an MoE layer"),
        ("mlp_only_layers", [-1], "mlp_only_layers = [-1]"),
        ("mlp_only_layers", "0", "mlp_only_layers = '0'"),
        ("eos_token_id", "</s>", "eos_token_id = '</s>'"),
        ("eos_token_id", [1, 151936], "eos_token_id = [1, 151936]: must be below vocab_size (151936)"),
        ("hidden_act", "gelu", "hidden_act = 'gelu': is not implemented; only 'silu' or 'swish'"),
        ("use_qk_norm", False, "use_qk_norm = False: is not implemented"),
        ("qkv_bias", True, "could change the result: qkv_bias = True"),
        ("shared_expert_intermediate_size", 512, "shared_expert_intermediate_size = 512"),
        ("scoring_func", "sigmoid", "scoring_func = 'sigmoid'"),
        ("logit_scale", 0.5, "logit_scale = 0.5"),
        ("quantization_config", {"quant_method": "gptq"}, "gptq"),
        ("layer_types", ["sliding_attention"] * 48, "layers with a sliding window are not implemented"),
    ],
)
def test_refused_by_name(field: str, value: object, message: str) -> None:
    assert message in refusal(QWEN3_30B | {field: value})


def test_every_unknown_field_is_named_at_once() -> None:
    message = refusal(QWEN3_30B | {"attn_logit_softcapping": 30.0, "router_temperature": 2.0})
    assert "attn_logit_softcapping = 30.0; router_temperature = 2.0" in message


@pytest.mark.parametrize(
    "extra",
    [
        {"unknown_feature": False},
        {"unknown_feature": None},
        {"unknown_size": 0, "unknown_list": []},
        {"_name_or_path": "somewhere", "id2label": {"0": "x"}, "pad_token_id": 7},
        {"num_experts": None, "num_local_experts": 128},
    ],
)
def test_harmless_or_neutral_fields_are_accepted(extra: dict) -> None:
    assert describe(QWEN3_30B | extra) == describe(QWEN3_30B)


@pytest.mark.parametrize(
    ("base", "sliding"),
    [(QWEN2_A27B | {"max_window_layers": 5}, (0, 2, 4)), (QWEN3_30B, tuple(range(48)))],
    ids=["qwen2", "qwen3"],
)
def test_sliding_window(base: dict, sliding: tuple[int, ...]) -> None:
    """Off, or as wide as the context, it changes nothing; transformers says which layers have it."""
    window = base | {"use_sliding_window": True}
    context = base["max_position_embeddings"]
    assert describe(window | {"sliding_window": context}) == describe(base)
    assert describe(base | {"sliding_window": 16}) == describe(base)
    narrow = describe(window | {"sliding_window": context - 1}).shape.attention
    assert tuple(i for i, layer in enumerate(narrow) if layer.window == context - 1) == sliding
    assert {layer.window for layer in narrow} <= {0, context - 1}
    assert "sliding_window is missing" in refusal(window | {"sliding_window": None})
    for wrong in (0, "all"):
        assert f"sliding_window = {wrong!r}: must be an integer" in refusal(
            window | {"sliding_window": wrong}
        )
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": context}
    longer = describe(window | {"sliding_window": context, "rope_scaling": scaled})
    assert longer.shape.attention[0].window == context


def test_dense_layers_need_a_size() -> None:
    message = refusal(QWEN3_30B | {"mlp_only_layers": [0], "intermediate_size": None})
    assert "intermediate_size = None: must be the size of the layers that are not MoE layers" in message


def test_indivisible_heads_need_head_dim() -> None:
    odd = QWEN3_30B | {"hidden_size": 2050}
    assert describe(odd).shape.attention[0].head_dim == 128
    assert "num_attention_heads = 32: must divide hidden_size" in refusal(odd | {"head_dim": None})


def test_describing_imports_no_torch() -> None:
    code = (
        "import json, sys; from turnout.models import describe; describe(json.load(sys.stdin));"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], input=json.dumps(QWEN3_30B), text=True, check=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(edits=st.dictionaries(st.sampled_from(sorted(QWEN3_30B)), JSON, min_size=1, max_size=2))
def test_any_json_is_described_or_refused(edits: dict) -> None:
    """Never another exception, and never a description that could not be of a model."""
    try:
        description = describe(QWEN3_30B | edits)
    except UserError:
        return
    shape, moe = description.shape, description.moe
    assert all(layer.num_heads % layer.num_kv_heads == 0 for layer in shape.attention)
    assert shape.max_position_embeddings > 0 < description.dense.total
    assert 0 < moe.top_k <= moe.num_experts
    assert description.moe_layers
