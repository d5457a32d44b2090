"""config.json, quantisation records and what a model is called; none of it needs torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from compressed_tensors.utils.match import match_name
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from tests.checkpoint.packing import nvfp4_scheme
from turnout.checkpoint import CheckpointError, locate, parse_quantization, read_config
from turnout.checkpoint.locate import require_folder, require_model
from turnout.checkpoint.patterns import ModulePatterns
from turnout.errors import UserError

EXPERTS = "model.layers.3.mlp.experts"
MODULES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.shared_expert_gate",
    "model.layers.1.mlp.shared_expert.gate_proj",
    "model.layers.1.mlp.experts.0.gate_proj",
    "model.layers.1.mlp.experts.17.down_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
]

# read_config


def test_missing_configuration_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b": }', "line 2 column 7"),
        ("", "line 1 column 1"),
        ("[1]", "expected a JSON object, found list"),
        (b"\xff\xfe{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_malformed_configuration_names_the_position(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        read_config(tmp_path)
    assert words in str(caught.value)


def test_a_bare_file_or_a_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3_moe"}')
    assert read_config(path) == read_config(tmp_path) == {"model_type": "qwen3_moe"}


def modelopt_folder(folder, inside=None, own_file=None):
    (folder / "config.json").write_text(json.dumps({"quantization_config": inside} if inside else {}))
    if own_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(own_file))
    return folder


def test_modelopt_file_completes_the_configuration(tmp_path):
    record = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    config = read_config(modelopt_folder(tmp_path, own_file={"quantization": record}))
    assert config["quantization_config"] == {"quant_method": "modelopt", **record}
    assert parse_quantization(config).method == "modelopt"


def test_where_both_speak_the_configuration_counts(tmp_path):
    inside = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    own_file = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    assert read_config(modelopt_folder(tmp_path, inside, own_file))["quantization_config"] == inside


def test_two_records_that_contradict_each_other(tmp_path):
    inside = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    folder = modelopt_folder(tmp_path, inside, {"quantization": {"quant_algo": "FP8"}})
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json.* expected NVFP4, found FP8"):
        read_config(folder)


def test_modelopt_file_without_a_record(tmp_path):
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: has no object named quantization"):
        read_config(modelopt_folder(tmp_path, own_file={"quantization": "NVFP4"}))


# parse_quantization


def quantization(**record):
    return parse_quantization({"quantization_config": record}, "config.json")


def compressed(quantized_activations=True, **record):
    scheme = json.loads(nvfp4_scheme(quantized_activations=quantized_activations).model_dump_json())
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": scheme},
        **record,
    }


def compressed_int4(activations=None, **fields):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"weights": weights | fields, "input_activations": activations, "targets": ["Linear"]}
    return compressed(format="pack-quantized", config_groups={"group_0": group})


def compressed_fp8(strategy="tensor", **fields):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | fields
    return compressed(
        format="float-quantized", config_groups={"group_0": {"weights": weights, "targets": ["Linear"]}}
    )


def test_no_record_means_plain_weights():
    for config in ({}, {"quantization_config": None}):
        assert parse_quantization(config).experts_format(EXPERTS) == ("bf16", False)


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("nvfp4", True)),
        ({"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"}, ("nvfp4", True)),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, ("nvfp4", True)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, ("nvfp4", True)),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, ("nvfp4", False)),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, ("bf16", False)),
        (compressed(), ("nvfp4", True)),
        (compressed(False), ("nvfp4", False)),
        ({"quant_method": "mxfp4"}, ("mxfp4", False)),
        (compressed_int4(group_size=32), ("int4", False)),
        (compressed_int4(strategy="channel", group_size=None), ("int4", False)),
        (compressed_int4(actorder="weight"), ("int4", False)),
        (compressed_int4(actorder="group"), ("bf16", False)),
        (compressed_int4(symmetric=False), ("bf16", False)),
        (compressed_int4(scale_dtype="torch.bfloat16"), ("int4", False)),
        (compressed_int4(scale_dtype="torch.float16"), ("bf16", False)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", False)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", False)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, ("fp8", False)),
        (compressed_fp8(), ("fp8", False)),
    ],
)
def test_supported_records(record, format):
    assert quantization(**record).experts_format(EXPERTS) == format


@pytest.mark.parametrize("activations", [None, {"num_bits": 4, "type": "float", "group_size": 16}])
def test_modelopt_input_activations_null_means_weight_only(activations):
    group = {"weights": {"num_bits": 4, "type": "float"}, "input_activations": activations}
    record = quantization(quant_method="modelopt", quant_algo="NVFP4", config_groups={"group_0": group})
    assert record.experts_format(EXPERTS) == ("nvfp4", activations is not None)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def mixed(layers):
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def quark(weight=MXFP4, **fields):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, **fields}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"quant_method": "gptq"}, ("quant_method 'gptq'", "modelopt", "compressed-tensors", "mxfp4", "fp8")),
        ({"bits": 4}, ("quant_method",)),
        ({"quant_method": "modelopt"}, ("quant_algo None", "NVFP4")),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, ("quant_algo 'W4A16_AWQ'", "NVFP4", "FP8")),
        ({"quant_method": "modelopt", "quant_algo": "MXFP4", "group_size": 16}, ("group_size 16", "32")),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            ("MIXED_PRECISION", "quantized_layers"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ("group_size 32", "16")),
        (compressed(format="marlin-24"), ("format 'marlin-24'", "nvfp4-pack-quantized", "pack-quantized")),
        (compressed(format="pack-quantized"), ("group_0.weights.type 'float'", "int")),
        (compressed_int4(num_bits=8), ("group_0.weights.num_bits 8", "4")),
        (compressed_int4(group_size=48), ("group_0.weights.group_size 48", "32, 64, 128")),
        (compressed_int4(strategy="tensor"), ("group_0.weights.strategy 'tensor'", "group")),
        (compressed_int4(activations={"num_bits": 8}), ("group_0.input_activations", "None")),
        (compressed(format="mxfp4-pack-quantized"), ("group_0.weights.group_size 16", "32")),
        (
            mixed({"lm_head": {"quant_algo": "INT4_AWQ"}}),
            ("quantized_layers['lm_head'].quant_algo 'INT4_AWQ'", "NVFP4"),
        ),
        (mixed({EXPERTS: "FP8"}), ("quantized_layers", "each quantised module's quant_algo")),
        (quark({"dtype": "int4"}), ("global_quant_config.weight", "fp4 per_group 32 e8m0")),
        (quark([MXFP4, MXFP4]), ("global_quant_config.weight", "fp4 per_group 32 e8m0")),
        (quark(export={"weight_format": "fake_quantized"}), ("weight_format 'fake_quantized'",)),
        (quark(layer_type_quant_config={"Linear": {}}), ("layer_type_quant_config",)),
        (compressed(config_groups={}), ("config_groups", "one group")),
        (compressed(format="mixed-precision"), ("format 'mixed-precision'", "pack-quantized")),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            ("sparsity_config 'sparse-24-bitmask'",),
        ),
        (compressed(transform_config={"config_groups": {"R1": {}}}), ("transform_config",)),
        ({**FP8, "weight_block_size": [64, 64]}, ("weight_block_size [64, 64]", "[128, 128]")),
        (compressed_fp8(strategy="token"), ("weights.strategy 'token'", "tensor, channel, block")),
        (
            compressed_fp8(strategy="block", block_structure=[64, 64]),
            ("block_structure [64, 64]", "[128, 128]"),
        ),
        (compressed_fp8(symmetric=False), ("weights.symmetric False", "True")),
        ({**FP8, "activation_scheme": "static"}, ("activation_scheme 'static'", "dynamic")),
        ({**FP8, "expert_dtype": "fp4"}, ("expert_dtype 'fp4'",)),
        ({**FP8, "modules_to_not_convert": "lm_head"}, ("modules_to_not_convert", "a list of strings")),
        ({**FP8, "modules_to_not_convert": ["("]}, ("modules_to_not_convert", "'('", "valid pattern")),
        (compressed(ignore=["re:["]), ("ignore", "re:[", "valid pattern")),
    ],
)
def test_unsupported_records_are_refused_by_name(record, words):
    with pytest.raises(UserError, match=r"config\.json") as caught:
        quantization(**record)
    for word in words:
        assert word in str(caught.value)


def test_dynamic_global_scales_of_activations_are_refused():
    record = compressed()
    record["config_groups"]["group_0"]["input_activations"]["dynamic"] = True
    with pytest.raises(UserError, match=r"input_activations\.dynamic True is not supported.*local"):
        quantization(**record)


def test_a_record_that_is_no_object():
    with pytest.raises(CheckpointError, match=r"expected a JSON object, found str"):
        parse_quantization({"quantization_config": "fp8"})


# Which modules are left out


@pytest.mark.parametrize(
    "entry", ["lm_head", r"re:.*mlp\.gate$", "re:.*gate", "re:model.layers.1.", "mlp.gate"]
)
def test_compressed_tensors_patterns_match_as_the_library_does(entry):
    ours = ModulePatterns.parse("compressed-tensors", [entry], "test")
    for module in MODULES:
        assert ours.matches(module) == match_name(module, entry), module


TRANSFORMERS = [
    "lm_head",
    "mlp.gate",
    "gate",
    "model.layers.1",
    "model.layers.1.",
    "model.layers.*.self_attn",
    "model.layers.*.mlp.gate",
    "model.layers.1.mlp.experts.0.gate_proj",
    "q_proj",
    "model.layers.1.mlp.gat",
    "a|lm",
]


@pytest.mark.parametrize("entry", TRANSFORMERS)
def test_transformers_patterns_match_as_the_library_does(entry):
    ours = ModulePatterns.parse("transformers", [entry], "test")
    for module in MODULES:
        assert ours.matches(module) == (not should_convert_module(module, [entry])), module


@settings(max_examples=200, deadline=None)
@given(entry=st.text(alphabet="model.layers1*_gate", min_size=1, max_size=12))
def test_any_transformers_pattern_matches_as_the_library_does(entry):
    try:
        expected = [not should_convert_module(module, [entry]) for module in MODULES]
    except re.error:
        with pytest.raises(UserError, match="not a valid pattern"):
            ModulePatterns.parse("transformers", [entry], "test")
        return
    ours = ModulePatterns.parse("transformers", [entry], "test")
    assert [ours.matches(module) for module in MODULES] == expected


@pytest.mark.parametrize(
    ("entry", "matched"),
    [
        ("lm_head", {"lm_head"}),
        ("model.layers.1.self_attn*", {"model.layers.1.self_attn.q_proj"}),
        ("model.layers.1.self_attn", {"model.layers.1.self_attn.q_proj"}),
        ("model.layers.1.mlp.gate", {"model.layers.1.mlp.gate"}),
        ("*.gate", {"model.layers.1.mlp.gate"}),
        ("*q_proj", {"model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"}),
        ("model.layers.?.self_attn.*", {"model.layers.1.self_attn.q_proj"}),
        ("self_attn", set()),
        ("re:.*", set()),
    ],
)
def test_modelopt_patterns_are_shell_patterns_of_a_module_or_its_parents(entry, matched):
    ours = ModulePatterns.parse("modelopt", [entry], "test")
    assert {module for module in MODULES if ours.matches(module)} == matched


def test_no_entries_match_nothing():
    assert not ModulePatterns().matches("lm_head")


def test_only_targets_are_quantised():
    record = compressed()
    record["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\.experts.*"]
    parsed = quantization(**record)
    assert parsed.experts_format(EXPERTS) == ("nvfp4", True)
    assert not parsed.of("model.layers.3.self_attn.q_proj")


def test_a_group_that_names_modules_goes_before_one_of_a_class():
    record = compressed(ignore=["re:.*mlp[.]gate$"])
    groups = record["config_groups"]
    groups["group_1"] = compressed_fp8()["config_groups"]["group_0"] | {
        "format": "float-quantized",
        "targets": ["re:.*self_attn.*"],
    }
    parsed = quantization(**record)
    assert parsed.experts_format(EXPERTS) == ("nvfp4", True)
    assert parsed.is_fp8("model.layers.3.self_attn.q_proj")
    assert not parsed.is_fp8("lm_head")
    assert parsed.of("lm_head").format == "nvfp4"
    assert parsed.of("model.layers.3.mlp.gate") is None


@pytest.mark.parametrize("names", [r"(gate_proj|up_proj|down_proj)", r"w[123]"])
def test_targets_name_experts_as_the_family_does(names):
    record = compressed()
    record["config_groups"]["group_0"]["targets"] = [rf"re:^model\.layers\.\d+\.mlp\.experts\.\d+\.{names}$"]
    assert quantization(**record).experts_format(EXPERTS) == ("nvfp4", True)


def test_layers_of_mixed_precision_by_name():
    layers = {EXPERTS: {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "lm_head": {"quant_algo": "FP8"}}
    parsed = quantization(**mixed(layers), ignore=["*layers.3.mlp.experts"])
    assert parsed.is_fp8("lm_head")
    assert parsed.experts_format(EXPERTS) == ("bf16", False)
    assert quantization(**mixed(layers)).experts_format(EXPERTS) == ("nvfp4", False)
    assert quantization(**mixed(layers)).of("model.layers.3.mlp.gate") is None


def test_a_projection_that_is_quantised_otherwise():
    layers = {f"{EXPERTS}.0.{name}": {"quant_algo": "NVFP4"} for name in ("gate_proj", "up_proj")}
    layers[f"{EXPERTS}.0.down_proj"] = {"quant_algo": "FP8"}
    with pytest.raises(UserError, match=r"experts: some projections.*share a format"):
        quantization(**mixed(layers)).experts_format(EXPERTS)


def test_patterns_of_quark():
    eight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    layers = {"*self_attn*": {"weight": eight}, "*.3.self_attn.k_proj": {"weight": MXFP4}}
    parsed = quantization(**quark(layer_quant_config=layers, exclude=["lm_head", r"re:.*mlp\.gate$"]))
    assert parsed.is_fp8("model.layers.3.self_attn.k_proj")  # the first pattern counts
    assert parsed.experts_format(EXPERTS) == ("mxfp4", False)
    assert [parsed.of(name) for name in ("lm_head", "model.layers.3.mlp.gate")] == [None, None]


def test_ignored_layers_of_autofp8():
    parsed = quantization(quant_method="fp8", ignored_layers=[r"re:.*layers\.3\..*"])
    assert parsed.experts_format(EXPERTS) == ("bf16", False)
    assert parsed.experts_format("model.layers.4.mlp.experts") == ("fp8", False)


def test_mxfp4_is_for_experts_alone():
    parsed = quantization(quant_method="mxfp4")
    assert not parsed.of("model.layers.0.self_attn.q_proj")
    assert not parsed.of("model.layers.0.mlp.shared_experts.up_proj")
    assert parsed.of("model.layers.0.mlp.experts.gate_up_proj")


def test_experts_of_one_layer_share_a_format():
    parsed = quantization(quant_method="modelopt", quant_algo="NVFP4", ignore=["*.up_proj"])
    with pytest.raises(UserError, match=rf"{EXPERTS}.*share a format"):
        parsed.experts_format(EXPERTS)


# locate


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local cache holding org/model, laid out as huggingface_hub does."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--model"
    snapshot = repo / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_folder_or_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == locate(str(tmp_path / "config.json")) == tmp_path


def test_a_cached_hub_id(hub):
    assert locate("org/model") == hub


def test_a_folder_counts_before_a_hub_id(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/model").resolve() == tmp_path / "org" / "model"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/other", "hf download org/other"),
        ("org/a--b", "hf download"),
        ("org/--bad--", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("", "there is no such folder"),
    ],
)
def test_a_model_that_is_not_here(hub, model, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        locate(model)


def test_a_configuration_of_another_name_says_everything_itself(tmp_path):
    file = tmp_path / "qwen3.json"
    file.write_text('{"hidden_size": 64}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert locate(str(file)) == file
    assert read_config(file) == {"hidden_size": 64}
    with pytest.raises(UserError, match=r"qwen3\.json is a configuration without weights.*give the folder"):
        require_folder(file)
    require_folder(tmp_path)


def test_a_folder_without_a_configuration_names_the_one_below_that_has_it(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json; give the folder that does"):
        require_model(tmp_path)
    model = tmp_path / "snapshots" / "0123abcd"  # as in the cache of Hugging Face's hub
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"holds no config\\.json; give {model}, which does"):
        require_model(tmp_path)
    require_model(model)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="give the folder"):
        locate(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["demo"])
def test_bundled_models(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["turnout.checkpoint.locate"].BUNDLED, name, tmp_path / name)
    with pytest.raises(UserError, match="not part of this installation"):
        locate(name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "here" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert locate(name) == tmp_path / name
    assert locate(f"./{name}").resolve() == tmp_path / "here" / name


def test_none_of_this_imports_torch(tmp_path):
    """The server and `plan` start in a second because of it."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    code = (
        "import sys; from pathlib import Path\n"
        "from turnout.checkpoint import locate, parse_quantization, read_config\n"
        "folder = locate(sys.argv[1])\n"
        "assert parse_quantization(read_config(folder)).format == 'mxfp4'\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_a_record_next_to_the_language_models_fields_counts():
    """As Kimi-K2.5 has it, whose own dtype is there too."""
    record = compressed_int4(group_size=32)
    for dtype, format in (("bfloat16", "int4"), ("float16", "bf16"), (None, "int4")):
        text = {"quantization_config": record} | ({"dtype": dtype} if dtype else {})
        found = parse_quantization({"text_config": text})
        assert (found.method, found.format) == ("int4", format)
