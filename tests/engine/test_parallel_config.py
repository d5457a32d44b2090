"""Hosts and devices of the ranks, and what each rank has of them."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.engine.planned import NVFP4, QWEN3_30B, SMALL, write
from tests.engine.remedies import followed
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.errors import PlanRefused
from turnout.parallel.hardware import GB, Hardware, named

HOST = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=32 * GB, present=True)
H200 = named("h200")
SERVER = replace(H200, present=True, devices=4)
APART = {"enable_dp_attention": True}


@pytest.fixture
def model(tmp_path):
    return partial(write, tmp_path)


def refusals(config, hardware=HOST, **rank):
    with pytest.raises(PlanRefused) as error:
        resolve(config, hardware, **rank)
    return {r.asked: r for r in error.value.refusals}


# --- hosts ----------------------------------------------------------------------------------------


def test_several_hosts_need_an_address_for_their_rendezvous(model):
    (asked,) = refusals(model(tp_size=2, nnodes=2))
    assert asked == "--nnodes 2 without --dist-init-addr"
    engine_plan = resolve(model(tp_size=2, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:29500"), HOST)
    assert (engine_plan.topology.rank, engine_plan.topology.node) == (1, 1)


def test_a_plan_for_named_hardware_needs_no_address(model):
    assert resolve(model(tp_size=2, nnodes=2), H200).topology.ranks_per_node == 1


def test_ranks_that_were_launched_have_met(model):
    assert resolve(model(tp_size=2, nnodes=2), HOST, rank=1).topology.rank == 1


@pytest.mark.parametrize("address", ["nowhere", "host:", ":29500", "host:0", "host:65536", "a:b:1", "h o:1"])
def test_an_address_that_is_none_is_refused(model, address):
    (refusal,) = refusals(model(tp_size=2, nnodes=2, dist_init_addr=address)).values()
    assert refusal.asked == f"--dist-init-addr {address}"
    assert "HOST:PORT" in refusal.remedy


def test_a_host_beyond_the_last_is_refused(model):
    config = model(tp_size=4, nnodes=2, node_rank=2, dist_init_addr="h:1")
    (refusal,) = refusals(config).values()
    assert refusal.asked == "--node-rank 2 with --nnodes 2"
    assert [c.node_rank for c in followed(config, refusal)] == [1, 2]
    assert resolve(followed(config, refusal)[0], HOST).topology.rank == 2


def test_ranks_that_hosts_cannot_share_evenly_are_refused(model):
    config = model(tp_size=4, nnodes=3, node_rank=1, dist_init_addr="h:1")
    refusal = refusals(config)["--nnodes 3 with --tp-size 4"]
    assert [c.nnodes for c in followed(config, refusal)] == [1, 2, 4, 3]


def test_more_ranks_than_gpus_are_refused(model):
    config = model(QWEN3_30B, tp_size=8)
    (refusal,) = refusals(config, SERVER).values()
    assert "4 x h200" in refusal.limit
    fewer, more_hosts = followed(config, refusal)
    assert resolve(fewer, SERVER).topology.tp_size == 4
    spread = replace(more_hosts, dist_init_addr="h:1")
    assert resolve(spread, SERVER).topology.ranks_per_node == 4
    assert resolve(config, replace(SERVER, devices=8))


# --- what each rank has ---------------------------------------------------------------------------


def test_cpu_ranks_of_one_host_share_its_memory(model):
    four = {"tp_size": 4, "dp_size": 4, "ep_size": 4} | APART
    assert resolve(model(**four), HOST).hardware.memory_bytes == 8 * GB
    assert resolve(model(nnodes=2, dist_init_addr="h:1", **four), HOST).hardware.memory_bytes == 16 * GB
    assert resolve(model(QWEN3_30B, **four), H200).hardware.memory_bytes == 141 * GB
    # 30 billion weights in NVFP4 fit once, and a fourth of them in a fourth of the memory.
    fits = replace(HOST, memory_bytes=44 * GB)
    assert resolve(model(QWEN3_30B | NVFP4), fits)
    together = resolve(model(QWEN3_30B | NVFP4, tp_size=4, ep_size=4), fits)
    assert together.memory.available == int(0.85 * 11 * GB)
    assert "one KV page" in next(iter(refusals(model(QWEN3_30B | NVFP4, **four), fits)))


@pytest.mark.parametrize("hardware", [replace(HOST, memory_bytes=128 * GB), H200], ids=["cpu", "h200"])
@pytest.mark.parametrize(
    "flags",
    [
        {"tp_size": 8, "ep_size": 4, "dp_size": 2, **APART},
        {"tp_size": 4, "dp_size": 4, "ep_size": 4, **APART},
        {"tp_size": 4, "ep_size": 2},
    ],
)
def test_all_ranks_have_the_same_pages_and_their_own_experts(model, hardware, flags):
    """Whoever shares requests schedules alike, hence with as many pages."""
    config = model(QWEN3_30B | NVFP4, mem_fraction_static=1.0, **flags)
    ranks = [resolve(config, hardware, rank=r) for r in range(config.tp_size)]
    for field in ("num_pages", "max_context", "budget", "memory"):
        assert len({getattr(engine_plan, field) for engine_plan in ranks}) == 1
    count = 128 // config.ep_size
    expert_tp = config.tp_size // config.ep_size
    firsts = [engine_plan.plan.first_expert for engine_plan in ranks]
    assert firsts == [count * (r // expert_tp) for r in range(config.tp_size)]
    assert [engine_plan.topology.rank for engine_plan in ranks] == list(range(config.tp_size))


@pytest.mark.parametrize(("attention_tp", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_kv_heads_are_split_and_then_repeated(model, attention_tp, heads):
    engine_plan = resolve(model(tp_size=attention_tp), HOST)
    per_token = engine_plan.memory.kv // engine_plan.num_pages // engine_plan.page_size
    assert per_token == 2 * 2 * heads * 32 * 4  # keys and values, layers, heads, head size, float32


def test_a_shared_expert_is_split_where_the_layer_sums_and_else_whole(model):
    fields = SMALL | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 64,
    }
    fields = {k: v for k, v in fields.items() if k not in ("head_dim", "attention_bias")}
    shared, attention, routers = 2 * 3 * 64 * 128, 2 * 2 * 128 * (128 + 64), 2 * 128 * (8 + 1)
    biases, norms, vocabulary = 2 * (128 + 2 * 64), (2 * 2 + 1) * 128, 2 * 512 * 128
    every = routers + norms

    def dense(**flags):
        return resolve(model(fields, **flags), HOST).memory.dense // 4

    assert dense() == shared + attention + biases + vocabulary + every
    assert dense(tp_size=2) == (shared + attention + biases + vocabulary) // 2 + every
    assert dense(tp_size=2, dp_size=2, **APART) == shared + attention + biases + vocabulary + every
    sent = dense(tp_size=2, moe_a2a_backend="collective")
    assert sent == shared + (attention + biases + vocabulary) // 2 + every


def test_ranks_that_share_requests_take_no_target(model):
    with pytest.raises(PlanRefused, match=r"--target-tpot 20 where 2 ranks share requests.*dp-size 2"):
        resolve(model(tp_size=2, target_tpot=20.0), named("h200"))
    assert resolve(model(tp_size=2, dp_size=2, enable_dp_attention=True, target_tpot=20.0), named("h200"))


def test_prompts_wait_for_those_of_other_ranks_where_steps_without_are_graphs(model):
    pair = {"tp_size": 2, "dp_size": 2, "ep_size": 2, **APART}

    def why(shape: dict = QWEN3_30B | NVFP4, device: Hardware = H200, **flags: object) -> str:
        return resolve(model(shape, **flags), device).why_no_prefill_delayer

    assert why(**pair) == ""
    assert why(**pair, prefill_delayer="off") == "--prefill-delayer is off"
    eager = "decode steps are no CUDA graphs: asked for with --disable-cuda-graph"
    assert why(**pair, disable_cuda_graph=True) == eager
    assert why(SMALL, HOST, **pair).startswith("decode steps are no CUDA graphs: ")
    assert why(SMALL, HOST, **pair, prefill_delayer="on") == ""
    assert why() == "there is one data-parallel rank"
    (asked,) = refusals(model(SMALL, prefill_delayer="on"))
    assert asked == "--prefill-delayer on with --dp-size 1"


# --- layouts by default ---------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[1] / "models" / "published"


def layout(folder, name, **flags):
    """(attention groups, expert slices) of four ranks"""
    shutil.copyfile(PUBLISHED / f"{name}.json", folder / "config.json")
    topology = resolve(Config(model=str(folder), tp_size=4, **flags), H200).topology
    return topology.dp_size, topology.ep_size


def test_ranks_with_whole_caches_have_requests_of_their_own(tmp_path):
    """Unless a flag says how requests or experts are divided."""
    assert layout(tmp_path, "deepseek-v4-flash") == (4, 4)
    assert layout(tmp_path, "deepseek-v4-flash", enable_dp_attention=False) == (1, 1)
    assert layout(tmp_path, "deepseek-v4-flash", ep_size=4) == (1, 4)
    assert layout(tmp_path, "deepseek-v4-flash", dp_size=2, enable_dp_attention=True) == (2, 1)
    assert layout(tmp_path, "glm-4.5-air") == (1, 1)
