"""Planned bytes of dense weights and experts against the tensors that each rank keeps when it loads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny import QWEN2_MOE, QWEN3_MOE, write_model
from turnout.checkpoint import open_checkpoint
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.models import load_model
from turnout.moe.layer import MoELayer
from turnout.parallel.groups import Group, Groups
from turnout.parallel.hardware import GB, Hardware
from turnout.parallel.topology import Topology

HOST = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=GB)
MODELS = {
    "qwen3, two KV heads": (QWEN3_MOE, {}),
    "shared experts, some layers dense": (
        QWEN2_MOE,
        {"shared_expert_intermediate_size": 96, "mlp_only_layers": [1]},
    ),
    "tied, odd vocabulary": (QWEN3_MOE, {"tie_word_embeddings": True, "vocab_size": 387}),
}
PARALLEL_LAYOUTS = {
    "alone": {},
    "tp 2": {"tp_size": 2},
    "tp 4, KV heads repeated": {"tp_size": 4, "ep_size": 2},
    "tp 4, all-to-all": {"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "collective"},
    "dp 2 of tp 4": {"tp_size": 4, "dp_size": 2, "ep_size": 4, "enable_dp_attention": True},
}


def groups_of(topology: Topology) -> Groups:
    """This rank's groups, without processes: loading asks only for its place in them."""
    attention = topology.attention_tp_groups()[topology.dp_rank]
    return Groups(
        topology=topology,
        world=Group(range(topology.tp_size), topology.rank),
        attention_tp=Group(attention, topology.attention_tp_rank),
    )


def tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Those reachable from `value`, but for the runners of MoE layers, also as one call, and counters."""
    if id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, seen)
    elif type(value).__module__.startswith("turnout."):
        seen.add(id(value))
        for name, item in vars(value).items():
            items = item.values() if isinstance(item, dict) else [item]
            if not (isinstance(value, MoELayer) and name in ("_runner", "_in_one_call", "expert_counts")):
                for one in items:
                    yield from tensors(one, seen)


def held(*values: Any) -> int:
    """Bytes, each storage counted once."""
    seen: set[int] = set()
    storages = [t.untyped_storage() for value in values for t in tensors(value, seen)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    base, fields = MODELS[request.param]
    path = tmp_path_factory.mktemp("model")
    write_model(path, base, **fields)
    return path


@pytest.mark.parametrize("name", PARALLEL_LAYOUTS)
def test_a_rank_holds_what_was_planned(folder, name):
    config = Config(model=str(folder), **PARALLEL_LAYOUTS[name])
    for rank in (0, config.tp_size - 1):
        engine_plan = resolve(config, HOST, rank=rank)
        model = load_model(
            open_checkpoint(folder),
            engine_plan.plan,
            groups=groups_of(engine_plan.topology),
            device="cpu",
            dtype=torch.float32,
        )
        # Norms keep a scaled copy, and one weight per head; panels of experts are aligned.
        assert held(model) == pytest.approx(engine_plan.memory.dense, rel=0.03)
        layers = [layer.mlp for layer in model._layers if isinstance(layer.mlp, MoELayer)]
        experts = held(*(layer._runner for layer in layers))
        assert experts == pytest.approx(engine_plan.memory.experts, rel=0.02)
