"""Parallel layouts of 1 to 1024 ranks: each planned so that it adds up, or refused with advice that works."""

import io
import json
import time
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from tests.engine.planned import NVFP4, QWEN3_30B, SMALL, write
from tests.engine.remedies import followed
from turnout.commands.plan import explain
from turnout.engine.engine_plan import read_model, resolve
from turnout.engine.parallel_layouts import parallel_layouts, receive_buffers
from turnout.errors import PlanRefused
from turnout.parallel.hardware import GB, Hardware, named

HOST = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=64 * GB, present=True)
H200 = named("h200")
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
# As large as DeepSeek-V3, within an architecture that is read.
LARGE = QWEN3_30B | {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "mlp_only_layers": [0, 1, 2],
    "intermediate_size": 18432,
    "num_experts": 256,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "eos_token_id": 1,
}
SHARED = QWEN3_30B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 1408,
    "num_experts": 60,
}
MODELS = {
    "30b": QWEN3_30B,
    "30b nvfp4": QWEN3_30B | NVFP4,
    "few heads": SMALL,
    "shards of 96 values in fp8 blocks": QWEN3_30B | FP8,
    "60 experts and a shared one": {
        k: v for k, v in SHARED.items() if k not in ("head_dim", "attention_bias")
    },
    "odd heads": QWEN3_30B | {"num_attention_heads": 36, "num_key_value_heads": 6},
}


@pytest.fixture
def model(tmp_path):
    return partial(write, tmp_path)


def attempt(config, hardware=H200):
    try:
        return resolve(config, hardware), ()
    except PlanRefused as error:
        return None, error.refusals


def large(folder, **fields):
    return partial(write, folder, LARGE | FP8 | fields)


# --- every layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_every_layout_is_planned_or_refused_with_advice_that_works(model, name, tp_size):
    config = model(MODELS[name], tp_size=tp_size)
    seen = list(parallel_layouts(config, read_model(config), H200))
    divisors = [n for n in (1, 2, 4, 8) if tp_size % n == 0]
    places = [(a.topology.dp_size, a.topology.ep_size) for a in seen]
    assert places == [(dp, ep) for dp in divisors for ep in divisors]
    for layout in seen:
        asked = replace(
            config,
            dp_size=layout.topology.dp_size,
            ep_size=layout.topology.ep_size,
            enable_dp_attention=layout.topology.dp_size > 1,
        )
        engine_plan, found = attempt(asked)
        assert (engine_plan is None) == (layout.engine_plan is None) == bool(found)
        assert set(layout.refusals) <= set(found)
        if engine_plan is None:
            assert advice_leads_to_a_plan(asked, found)
        else:
            adds_up(engine_plan)


def adds_up(engine_plan):
    """Sizes against sums over all ranks."""
    topology, plan, spec = engine_plan.topology, engine_plan.plan, engine_plan.description.moe
    held = [replace(topology, rank=r).expert_range(spec.num_experts) for r in range(topology.tp_size)]
    assert {len(experts) for experts in held} == {plan.num_local_experts}
    assert sorted(e for experts in held for e in experts) == sorted(
        list(range(spec.num_experts)) * topology.expert_tp
    )
    alone = topology.dp_size == 1
    for phase in (plan.prefill, plan.decode):
        owed = "layer" if phase.dispatcher == "none" and alone and topology.tp_size > 1 else "none"
        assert phase.reduce == owed
    assert plan.shared_expert == (
        "sharded" if plan.prefill.reduce == plan.decode.reduce == "layer" else "whole"
    )
    assert (plan.dispatch_bytes == 0) == (
        alone and plan.prefill.dispatcher == plan.decode.dispatcher == "none"
    )


def advice_leads_to_a_plan(config, refusals, depth=0):
    """Following any alternative of any refusal removes it; following on ends in a plan."""
    assert depth < 4
    reached = False
    for refusal in refusals:
        for changed in followed(config, refusal):
            engine_plan, left = attempt(changed)
            assert all((r.who, r.asked) != (refusal.who, refusal.asked) for r in left), (refusal, changed)
            reached = reached or engine_plan is not None or advice_leads_to_a_plan(changed, left, depth + 1)
    return reached


@pytest.mark.parametrize(
    "flags",
    [
        {"tp_size": 8, "dp_size": 3},
        {"tp_size": 4, "ep_size": 8},
        {"tp_size": 2, "nnodes": 3},
        {"tp_size": 4, "dp_size": 4},
        {"tp_size": 8, "ep_size": 3, "dp_size": 5},
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_advice_that_works(model, flags):
    config = model(QWEN3_30B, **flags)
    engine_plan, found = attempt(config)
    assert engine_plan is None
    assert advice_leads_to_a_plan(config, found)


def test_the_rest_of_the_flags_stays(model):
    config = model(QWEN3_30B, tp_size=4, moe_a2a_backend="collective", moe_dispatch_dtype="fp8")
    for layout in parallel_layouts(config, read_model(config), H200):
        plan = layout.engine_plan.plan
        assert (plan.prefill.dispatcher, plan.decode.dispatcher) == ("collective", "collective")
        assert plan.prefill.wire_format == "fp8"


# --- budgets at scale -----------------------------------------------------------------------------

EP32 = {"tp_size": 32, "dp_size": 32, "ep_size": 32, "enable_dp_attention": True}
EP1024 = {"tp_size": 1024, "dp_size": 1024, "ep_size": 1024, "enable_dp_attention": True}


def test_batched_experts_at_ep_32_are_shown_and_refused(tmp_path):
    """EP 32, capacity 8192, hidden 7168: 32 x 8192 rows, eight times over, of 2 x 14336 bytes: 60 GB."""
    config = large(tmp_path)(
        **EP32,
        moe_runner_backend="torch",
        moe_a2a_backend="collective-experts",
        max_dispatch_tokens_per_rank=8192,
    )
    engine_plan, found = attempt(config)
    assert engine_plan is None
    batched = 32 * 8192 * (8 * 2 * 2 * 7168 + 8 * 8)
    refusal = next(
        r for r in found if f"dispatch buffers {batched / 1e9:.3g} GB for 262144 tokens" in r.asked
    )
    assert "h200 has 141 GB" in refusal.limit
    for changed in followed(config, refusal):
        assert changed.max_dispatch_tokens_per_rank >= 2048
        assert not any("experts of 58 layers kept packed" in r.asked for r in attempt(changed)[1])


def test_advice_about_memory_is_as_much_as_fits(tmp_path):
    config = large(tmp_path)(**EP32, moe_a2a_backend="collective", max_dispatch_tokens_per_rank=12288)
    _, (refusal,) = attempt(config)
    (changed,) = followed(config, refusal)
    assert attempt(changed)[0] is not None
    more = replace(changed, max_dispatch_tokens_per_rank=changed.max_dispatch_tokens_per_rank + 1)
    assert attempt(more)[0] is None


@pytest.mark.parametrize(
    ("ep", "prefill", "received"), [(8, 2048, 8 * 2048), (32, 2048, 32 * 2048), (1024, 256, 1024 * 256)]
)
def test_receive_buffers_are_known_for_any_size(tmp_path, ep, prefill, received):
    config = large(tmp_path, num_experts=1024, num_hidden_layers=8)(
        tp_size=ep,
        dp_size=ep,
        ep_size=ep,
        enable_dp_attention=True,
        max_prefill_tokens=prefill,
        chunked_prefill_size=256,
    )
    engine_plan = resolve(config, H200)
    assert engine_plan.budget.received == received
    per_token = {"bf16": 2 * 7168, "fp8": 7168 + 4 * 56, "nvfp4": 3584 + 448}
    by_name = {buffers.dispatcher: buffers for buffers in receive_buffers(engine_plan)}
    for name, batched in (("collective", 1), ("collective-experts", 1024 // ep)):
        expected = {w: received * (batched * (size + 2 * 7168) + 8 * 8) for w, size in per_token.items()}
        assert by_name[name].sizes == expected
    chosen = by_name[engine_plan.plan.prefill.dispatcher]
    assert engine_plan.memory.dispatch == chosen.sizes[engine_plan.plan.prefill.wire_format]


def test_more_ranks_than_experts_are_refused(tmp_path):
    engine_plan, found = attempt(large(tmp_path)(**EP1024, max_prefill_tokens=64, chunked_prefill_size=64))
    assert engine_plan is None
    assert "256 experts over --ep-size 1024" in {r.asked for r in found}


def test_what_a_thousand_ranks_gather_is_refused_with_what_fits(tmp_path):
    flags = EP1024 | {"moe_runner_backend": "torch", "max_prefill_tokens": 2048}
    config = large(tmp_path, num_experts=1024, num_hidden_layers=8)(**flags)
    _, found = attempt(config)
    too_many = next(r for r in found if "for 2097152 tokens" in r.asked)
    changed = followed(config, too_many)[0]
    assert 64 <= changed.max_prefill_tokens < 2048
    _, left = attempt(changed)
    assert all("for 2097152 tokens" not in r.asked for r in left)


def test_drafts_enter_the_budget(tmp_path):
    config = large(tmp_path)(
        **EP32, max_running_requests=1000, speculative_algorithm="ngram", speculative_num_draft_tokens=5
    )
    engine_plan = resolve(replace(config, mem_fraction_static=1.0), replace(H200, memory_bytes=400 * GB))
    assert (engine_plan.budget.tokens_per_request, engine_plan.budget.decode) == (5, 5000)
    assert engine_plan.plan.decode.max_tokens == 32 * 5000
    _, found = attempt(replace(config, max_dispatch_tokens_per_rank=4999))
    (refusal,) = [r for r in found if r.who == "budget"]
    assert "--max-dispatch-tokens-per-rank 5000 or more" in refusal.remedy


# --- shown ----------------------------------------------------------------------------------------


def shown(config, as_json=False):
    out = io.StringIO()
    code = explain(config, hardware="h200", as_json=as_json, console=Console(file=out, width=200))
    return code, out.getvalue()


def test_the_table_has_a_row_for_each_and_reasons_for_the_rest(model):
    code, text = shown(model(QWEN3_30B, tp_size=8, ep_size=4))
    assert code == 0
    table = text.partition("Parallel layouts of 8 ranks")[2]
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert [(r[0], r[1]) for r in rows] == [(str(d), str(e)) for d in (1, 2, 4, 8) for e in (1, 2, 4, 8)]
    experts = 48 * 128 * 3 * 2048 * 768 // 8
    split = 2 * 2048 * (48 * (4096 + 512) + 151936) // 4  # projections and vocabulary, over attention TP
    weights = 2 * (experts + split + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048)
    # A token, its result, ids and weights thrice and two flags; of 128 tokens of each rank, the former twice.
    buffers = 2 * 8192 * (2 * 2 * 2048 + 3 * 8 * 8 + 2 * 8) + 8 * 128 * 2 * 2 * 2048 + 128
    size = [f"{weights / 1e9:.4g} GB", f"{buffers / 1e6:.4g} MB"]
    assert rows[6] == ["2", "4", "4", "2", "32", "nvlink", *size]
    code, text = shown(model(QWEN3_30B | FP8, tp_size=8, ep_size=8))
    assert code == 0
    assert "dp x ep 1 x 1, 2 x 1, 4 x 1, 8 x 1: layer: expert intermediate size 768 over 8" in text


def test_a_refused_layout_comes_with_those_that_work(model):
    code, text = shown(model(tp_size=8, ep_size=8))
    assert code == 2
    assert "4 heads, 2 of KV, over 8 attention-TP ranks" in text.partition("Parallel layouts of 8 ranks")[0]
    assert "│ 2  │" in text


def test_json_holds_parallel_layouts_and_buffers(model):
    for flags, code in (({"ep_size": 4}, 0), ({"ep_size": 3}, 2)):
        got, text = shown(model(QWEN3_30B, tp_size=8, **flags), as_json=True)
        values = json.loads(text)
        assert (got, values["refused"]) == (code, code == 2)
        assert len(values["parallel_layouts"]) == 16
        assert all(a["supported"] or a["refusals"] for a in values["parallel_layouts"])
    assert values["arrangements"] == values["parallel_layouts"]
    first = values["parallel_layouts"][5]
    assert (first["flags"], first["experts_per_rank"]) == ("--dp 2 --enable-dp-attention --ep 2", 64)
    assert first["prefill_dispatcher"] == "nvlink"
    values = json.loads(shown(model(QWEN3_30B, tp_size=8, ep_size=4), as_json=True)[1])
    assert {b["dispatcher"] for b in values["receive_buffers"]} == {
        "collective",
        "collective-experts",
        "nvlink",
        "nvlink-experts",
    }
    assert (values["topology"]["expert_tp"], values["budget"]["received"]) == (2, 8192)


def test_one_rank_has_nothing_to_arrange(model):
    code, text = shown(model())
    assert code == 0
    assert "Parallel layouts" not in text
    assert "parallel_layouts" not in json.loads(shown(model(), as_json=True)[1])


def test_a_thousand_ranks_are_arranged_in_seconds(tmp_path):
    code, text = shown(
        large(tmp_path, num_experts=1024)(**EP1024, max_prefill_tokens=64, chunked_prefill_size=64)
    )
    assert code == 0
    assert "1023" in text


@pytest.mark.parametrize("tp_size", [3600, 4096])
def test_ranks_beyond_what_divides_are_refused_in_seconds(model, tp_size):
    """3,600 ranks can be arranged in 45 x 45 ways, 4,096 in 13 x 13; most have empty shards."""
    began = time.monotonic()
    code, text = shown(model(QWEN3_30B, tp_size=tp_size))
    assert code == 2
    assert f"32 heads, 4 of KV, over {tp_size} attention-TP ranks" in text.partition("Refused parallel")[0]
    assert "  dp x ep 2 x any: model: " in text
    assert time.monotonic() - began < 60


def test_dense_layers_whole_on_each_rank_take_their_bytes(tmp_path):
    config = large(tmp_path)(tp_size=32, dp_size=4, ep_size=32, enable_dp_attention=True)
    split, whole = (attempt(replace(config, moe_dense_tp_size=size))[0] for size in (0, 1))
    assert whole.topology.attention_tp == 8
    more = whole.description.dense.mlps * 7 // 8
    assert more <= whole.memory.dense - split.memory.dense < 1.1 * 2 * more
