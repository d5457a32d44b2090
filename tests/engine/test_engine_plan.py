"""What is decided before weights load: sizes against plain arithmetic, contradictions, and their remedies."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.planned import NVFP4, QWEN3_30B, SMALL, write
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.memory_fit import CPU_KV_BYTES
from turnout.engine.step.near_ties import BLOCK
from turnout.errors import PlanRefused, UserError
from turnout.moe.backends.hopper.kernels.packed import Packed
from turnout.moe.backends.hopper.tile_config import LayerTiles
from turnout.parallel.hardware import GB, Hardware, named

HOST = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=32 * GB, present=True)
H200 = named("h200")


@pytest.fixture
def model(tmp_path):
    return partial(write, tmp_path)


def refusals(config, hardware=HOST):
    with pytest.raises(PlanRefused) as error:
        resolve(config, hardware)
    return {r.asked: r for r in error.value.refusals}


def test_a_published_model_on_a_gpu(model):
    """Qwen3-30B-A3B has 30.5 billion parameters, 29.0 of them in experts, and 96 kB of KV a token."""
    engine_plan = resolve(model(QWEN3_30B), H200)
    memory = engine_plan.memory
    assert engine_plan.compute_dtype == "bfloat16"
    assert memory.experts == 48 * 128 * 3 * 2048 * 768 * 2
    assert memory.dense + memory.experts == pytest.approx(2 * 30.53e9, rel=0.001)
    assert memory.kv == engine_plan.num_pages * 16 * (2 * 48 * 4 * 128 * 2)
    assert memory.available == int(0.85 * 141 * GB)
    page = memory.kv // engine_plan.num_pages
    assert memory.total <= memory.available < memory.total + page  # what is left goes to KV
    assert engine_plan.max_context == 40960


def test_a_plan_with_tuned_kernels_is_plain_values(model):
    """As /server_info and `plan --json` report it; a kernel's configuration is a type of its runner."""
    answer = resolve(model(QWEN3_30B | NVFP4), named("h200"))
    tiles = LayerTiles(Packed(128, 16, 64, 4, 4), Packed(64, 16, 64, 4, 4))
    tuned = replace(answer, plan=replace(answer.plan, tiles=((16, tiles),)))
    [[tokens, (first, second)]] = json.loads(json.dumps(tuned.describe()))["plan"]["tiles"]
    assert (tokens, first["kernel"], first["block_n"], second["block_n"]) == (16, "packed", 128, 64)


@pytest.mark.parametrize("name", ["fp8_e4m3", "float32"])
def test_a_kv_cache_of_another_type_is_refused(model, name):
    refusal = refusals(model(QWEN3_30B, kv_cache_dtype=name), H200)[f"--kv-cache-dtype {name}"]
    assert "in the compute type, bfloat16" in refusal.limit
    assert "use --kv-cache-dtype auto" in refusal.remedy
    assert resolve(model(QWEN3_30B, kv_cache_dtype="bfloat16"), H200)


def test_index_keys_in_fp8_are_for_models_that_keep_some(model):
    with pytest.raises(UserError, match="--index-cache-dtype fp8: Qwen3MoeForCausalLM keeps no index keys"):
        resolve(model(QWEN3_30B, index_cache_dtype="fp8"), H200)
    with pytest.raises(UserError, match="--index-cache-dtype 'fp4': must be one of auto, fp8"):
        model(QWEN3_30B, index_cache_dtype="fp4")


def test_ranks_share_experts_and_attention(model):
    one = resolve(model(QWEN3_30B), H200)
    eight = resolve(model(QWEN3_30B, tp_size=8, ep_size=8), H200)
    assert eight.memory.experts == one.memory.experts // 8
    queries, keys_values = 48 * 2 * 2048 * 4096, 48 * 2 * 2048 * 512
    routers, norms = 48 * 128 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    vocabulary = 2 * 151936 * 2048
    assert one.memory.dense == 2 * (queries + keys_values + vocabulary + routers + norms)
    # Everything matrix-like is split, but four KV heads over eight ranks: one each.
    split = (queries + vocabulary) // 8 + keys_values // 4
    assert eight.memory.dense == 2 * (split + routers + norms)
    per_token = eight.memory.kv // eight.num_pages // 16
    assert per_token == 2 * 48 * 1 * 128 * 2  # four KV heads over eight ranks: one each, held twice
    assert eight.plan.decode.reduce == "layer"


def test_a_cpu_keeps_its_kv_cache_small(model):
    """At 196 kB a token in float32, 256 MB hold 1301 tokens; a small model gets what it can use."""
    large = resolve(model(QWEN3_30B | NVFP4), replace(HOST, memory_bytes=64 * GB))
    assert large.compute_dtype == "float32"
    assert large.plan.weight_storage == "packed"
    assert large.memory.kv <= CPU_KV_BYTES < large.memory.kv + 16 * 2 * 48 * 4 * 128 * 4
    assert large.max_context == large.num_pages * 16 < 40960
    small = resolve(model(max_running_requests=2), HOST)
    assert small.num_pages == 2 * 2048 // 16
    assert small.max_context == 2048


def test_a_context_length_asked_for_gets_its_pages(model):
    config = model(QWEN3_30B | NVFP4, context_length=8192)
    engine_plan = resolve(config, replace(HOST, memory_bytes=64 * GB))
    assert engine_plan.max_context == 8192
    assert engine_plan.num_pages == 8192 // 16


def test_max_total_tokens_is_honoured(model):
    engine_plan = resolve(model(max_total_tokens=1000, page_size=64), HOST)
    assert (engine_plan.num_pages, engine_plan.page_size, engine_plan.max_context) == (16, 64, 1024)


def test_max_total_tokens_that_does_not_fit_names_the_most_that_does(model):
    (found,) = refusals(model(QWEN3_30B, max_total_tokens=10**7), H200).values()
    most = int(re.findall(r"--max-total-tokens (\d+)", found.remedy)[0])
    assert resolve(model(QWEN3_30B, max_total_tokens=most), H200).num_pages == most // 16
    assert refusals(model(QWEN3_30B, max_total_tokens=most + 1), H200)


def test_a_context_longer_than_the_kv_cache_is_refused(model):
    found = refusals(model(context_length=1024, max_total_tokens=512))["--context-length 1024"]
    assert "512 or less" in found.remedy
    assert "--max-total-tokens" in found.remedy
    assert resolve(model(context_length=512, max_total_tokens=512), HOST).max_context == 512


def test_a_context_longer_than_the_model_is_refused(model):
    found = refusals(model(context_length=4096))["--context-length 4096"]
    assert "2048" in found.limit
    assert resolve(model(context_length=1024), HOST).max_context == 1024


@pytest.mark.parametrize(
    ("fields", "flag", "allowed"),
    [({}, "fp8", "bf16"), (NVFP4, "mxfp4", "modelopt_fp4"), (NVFP4, "bf16", "modelopt_fp4")],
)
def test_quantization_must_be_what_the_checkpoint_holds(model, fields, flag, allowed):
    found = refusals(model(SMALL | fields, quantization=flag))[f"--quantization {flag}"]
    assert f"auto or {allowed}" in found.remedy
    assert resolve(model(SMALL | fields, quantization=allowed), HOST)


def test_weights_that_do_not_fit_are_refused_with_their_sizes(model):
    (found,) = refusals(model(QWEN3_30B), replace(H200, memory_bytes=62 * GB)).values()
    assert "experts 58 GB" in found.asked
    assert "52.7 GB" in found.limit
    assert "quantised" in found.remedy
    assert "--tp-size" in found.remedy
    (packed,) = refusals(model(QWEN3_30B | NVFP4), replace(H200, memory_bytes=20 * GB)).values()
    assert "quantised" not in packed.remedy
    share = float(re.findall(r"--mem-fraction-static to ([\d.]+)", found.remedy)[0])
    config = model(QWEN3_30B, mem_fraction_static=share)
    assert resolve(config, replace(H200, memory_bytes=62 * GB)).num_pages >= 1


def test_everything_wrong_is_said_at_once(model):
    config = model(
        tp_size=8,
        dp_size=8,
        ep_size=3,
        quantization="fp8",
        context_length=10**6,
        moe_runner_backend="no_such_runner",
        max_dispatch_tokens_per_rank=7,
        device="cuda",
    )
    assert set(refusals(config)) == {
        "--dp-size 8",
        "--ep-size 3 with --tp-size 8",
        "--quantization fp8",
        "--context-length 1000000",
        "--moe-runner-backend no_such_runner",
        "--max-dispatch-tokens-per-rank 7",
        "--device cuda",
    }


def test_several_ranks_are_planned_and_not_served(model):
    config = model(tp_size=2)
    assert resolve(config, HOST).topology.expert_tp == 2


def test_heads_that_do_not_divide_are_refused_with_sizes_that_do(model):
    """Four heads over eight ranks; two data-parallel groups make it four."""
    (found,) = refusals(model(tp_size=8, ep_size=8)).values()
    assert found.asked.startswith("4 heads, 2 of KV, over 8")
    assert found.remedy == "use --enable-dp-attention with --dp-size 2, 4 or 8"


def test_activations_are_quantised_only_when_asked_for_on_a_cpu(model):
    assert resolve(model(SMALL | NVFP4), HOST).plan.activation_format == "bf16"
    asked = resolve(model(SMALL | NVFP4, moe_activation_dtype="nvfp4"), HOST)
    assert asked.plan.activation_format == "nvfp4"
    weight_only = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}
    assert "--moe-activation-dtype nvfp4" in refusals(
        model(SMALL | weight_only, moe_activation_dtype="nvfp4")
    )


def test_a_float32_budget_covers_a_block_that_decides_a_near_tie(model):
    few = {"max_prefill_tokens": 16, "chunked_prefill_size": 16, "max_running_requests": 8}
    engine_plan = resolve(model(**few), HOST)
    assert engine_plan.budget.local == engine_plan.budget.capacity == BLOCK
    assert "--max-dispatch-tokens-per-rank 63" in refusals(model(**few, max_dispatch_tokens_per_rank=63))


def test_a_model_that_cannot_be_described_is_named(model, tmp_path):
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        resolve(model(SMALL | {"architectures": ["LlamaForCausalLM"]}), HOST)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        resolve(Config(model=str(tmp_path)), HOST)
    with pytest.raises(UserError, match="nowhere"):
        resolve(Config(model=str(tmp_path / "nowhere")), HOST)


def test_a_engine_plan_is_plain_json(model):
    values = json.loads(json.dumps(resolve(model(), HOST).describe()))
    assert values["memory"]["total"] == sum(
        size for name, size in values["memory"].items() if name not in ("total", "available")
    )
    assert values["kv"]["max_context"] == 2048


def attempt(config, hardware):
    """(engine plan, no refusals) or (None, refusals)."""
    try:
        return resolve(config, hardware), ()
    except PlanRefused as error:
        return None, error.refusals


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "context_length": st.integers(1, 3000),
        "max_running_requests": st.integers(1, 300),
        "max_total_tokens": st.integers(1, 10**8),
        "page_size": st.integers(1, 128),
        "mem_fraction_static": st.floats(0.01, 1.0),
        "max_prefill_tokens": st.integers(1, 10**6),
        "chunked_prefill_size": st.integers(1, 10**5),
        "max_dispatch_tokens_per_rank": st.integers(0, 4096),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "tp_size": st.sampled_from([1, 2, 3, 4, 8]),
        "dp_size": st.sampled_from([1, 1, 2, 4]),
        "ep_size": st.sampled_from([1, 2, 4]),
        "enable_dp_attention": st.booleans(),
        "nnodes": st.sampled_from([1, 1, 1, 2]),
        "dist_init_addr": st.sampled_from(["", "10.0.0.1:29500"]),
        "speculative_algorithm": st.sampled_from(["none", "ngram"]),
        "moe_a2a_backend": st.sampled_from(["auto", "auto", "none", "collective", "collective-experts"]),
        "moe_dispatch_dtype": st.sampled_from(["auto", "auto", "fp8", "nvfp4"]),
        "moe_weight_storage": st.sampled_from(["auto", "packed", "decoded"]),
    },
)


@settings(max_examples=150, deadline=None)
@given(FLAGS, st.sampled_from([GB // 20, GB, 32 * GB]), st.sampled_from(["cpu", "cuda"]))
def test_what_is_resolved_fits_and_what_does_not_has_remedies(tmp_path_factory, flags, memory, device):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    config = write(folder, SMALL | NVFP4, **flags)
    engine_plan, found = attempt(config, replace(HOST, memory_bytes=memory, device=device))
    assert (engine_plan is None) == bool(found)
    assert all(r.who and r.asked and r.limit and r.remedy for r in found)
    if engine_plan is None:
        return
    ranks = config.tp_size // config.nnodes if device == "cpu" else 1
    assert engine_plan.hardware.memory_bytes == memory // ranks
    assert config.nnodes == 1 or config.dist_init_addr
    assert config.dp_size == 1 or config.enable_dp_attention
    assert engine_plan.plan.prefill.wire_format == config.moe_dispatch_dtype.replace("auto", "bf16")
    assert engine_plan.plan.prefill.max_tokens >= config.dp_size * config.max_prefill_tokens
    tokens = engine_plan.num_pages * engine_plan.page_size
    assert engine_plan.memory.total <= engine_plan.memory.available <= memory
    assert 1 <= engine_plan.max_context <= min(tokens, config.context_length or 2048)
    assert tokens >= config.max_total_tokens
    assert not config.context_length or engine_plan.max_context == config.context_length
    useful = engine_plan.config.max_running_requests * (2048 + engine_plan.page_size)
    assert tokens <= max(useful, config.max_total_tokens + engine_plan.page_size)


def test_resolving_is_quick(model):
    config = model(QWEN3_30B | NVFP4)
    resolve(config, H200)  # imports

    def seconds() -> float:
        start = time.process_time()
        resolve(config, H200)
        return time.process_time() - start

    assert any(seconds() < 0.5 for _ in range(3))


def test_resolving_imports_neither_torch_nor_transformers(model):
    code = (
        "import sys; from turnout.config import Config; from turnout.engine.engine_plan import resolve; "
        f"resolve(Config(model={model().model!r}, device='cpu')); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("hardware", "asked", "chunk"), [(HOST, 0, 512), (H200, 0, 3000), (H200, 7, 7)])
def test_a_gpu_takes_a_prompt_at_once(model, hardware: Hardware, asked: int, chunk: int):
    config = model(SMALL, chunked_prefill_size=asked, max_prefill_tokens=3000)
    assert resolve(config, hardware).chunk_tokens == chunk
