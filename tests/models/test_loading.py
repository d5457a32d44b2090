"""Loading: what it reports, what it refuses, how much memory it needs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.writers import edit_config, save, write_checkpoint
from tests.checkpoint.writers import load as tensors_of
from tests.models.configs import BASES, empty_model, tiny
from tests.models.families import FAMILIES, build
from tests.models.running import PlainAttention, load
from tests.tiny import QWEN2_MOE, write_model
from turnout.attention.kinds import AttentionSpec
from turnout.checkpoint import CheckpointError, open_checkpoint
from turnout.errors import UserError
from turnout.models.interface import ModelShape
from turnout.models.shares import Share, whole
from turnout.models.weights import Weights


def test_shape_of_the_loaded_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert load(tmp_path).shape == ModelShape(
        architecture="Qwen3MoeForCausalLM",
        attention=(AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=16),) * 2,
        hidden_size=64,
        vocab_size=384,
        max_position_embeddings=512,
        eos_token_ids=(257,),
    )


def test_progress_counts_layers(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=3)
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, progress=lambda *report: seen.append(report))
    assert seen == [("loading layers", i, 3) for i in range(4)]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.shared_expert.down_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
    ],
)
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, QWEN2_MOE)
    tensors = tensors_of(tmp_path)
    del tensors[name]
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "tensor"),
    [
        ("vocab_size", 400, "model.embed_tokens.weight"),
        ("num_attention_heads", 2, "model.layers.0.self_attn.q_proj.weight"),
        ("moe_intermediate_size", 16, "model.layers.0.mlp.experts.0.gate_proj.weight"),
        ("shared_expert_intermediate_size", 32, "model.layers.0.mlp.shared_expert.gate_proj.weight"),
    ],
)
def test_config_of_another_size(field: str, value: int, tensor: str, tmp_path: Path) -> None:
    write_model(tmp_path, QWEN2_MOE)
    with edit_config(tmp_path) as config:
        config[field] = value
        config["head_dim"] = 16
    with pytest.raises(CheckpointError, match=tensor.replace(".", r"\.")) as error:
        load(tmp_path)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    ("base", "overrides", "edit", "tensor"),
    [
        ("qwen3", {"attention_bias": True}, {"attention_bias": False}, "self_attn.k_proj.bias"),
        ("qwen2", {}, {"qkv_bias": False}, "self_attn.k_proj.bias"),
        (
            "qwen2",
            {},
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "qkv_bias": None,
                "shared_expert_intermediate_size": None,
            },
            "q_norm.weight",
        ),
        ("qwen2", {}, {"shared_expert_intermediate_size": 0}, "mlp.shared_expert"),
        ("qwen3", {}, {"num_hidden_layers": 1}, "model.layers.1."),
    ],
)
def test_weights_without_a_place_are_refused(
    base: str, overrides: dict, edit: dict, tensor: str, tmp_path: Path
) -> None:
    """They would be dropped in silence, and the model would answer nonsense."""
    write_model(tmp_path, BASES[base], **overrides)
    with edit_config(tmp_path) as config:
        config.update(edit)
    with pytest.raises(UserError, match=tensor):
        load(tmp_path)


def test_unused_tensors_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    """Rotary frequencies, a head that is tied anyway, scales of a KV cache in FP8."""
    write_model(tmp_path, tie_word_embeddings=True)
    tensors = tensors_of(tmp_path)
    ids = list(range(20))
    (expected,) = PlainAttention(load(tmp_path)).logits(("a", ids))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = torch.ones(384, 64)
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.ones(1)
    tensors["model.layers.1.self_attn.v_scale"] = torch.ones(1)
    save(tmp_path, tensors)
    (logits,) = PlainAttention(load(tmp_path)).logits(("a", ids))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("deepseek_v4", "draft stages, mtp."),
        ("deepseek_v32", "draft layer (multi-token prediction), model.layers.3."),
        ("glm_moe_dsa", "draft layer (multi-token prediction), model.layers.4."),
    ],
)
def test_draft_layers_that_are_not_served_are_skipped_and_said(
    name: str, skipped: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = build(tmp_path, FAMILIES[name])
    prefix = skipped.partition(", ")[2]
    count = sum(tensor.startswith(prefix) for tensor in built.tensors)
    with caplog.at_level(logging.INFO, "turnout"):
        load(tmp_path)
    assert f"skipped {count} tensors" in caplog.text
    assert f"of the {skipped}*: text alone is served" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.3.up_proj.zero_point",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.sinks",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "lm_head.bias",
    ],
)
def test_tensors_that_nothing_reads_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Whatever they are called: a correction of the router or a zero point changes every answer."""
    write_model(tmp_path)
    save(tmp_path, tensors_of(tmp_path) | {name: torch.ones(8)})
    with pytest.raises(UserError, match=re.escape(name) + ".*without them the result would be wrong"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_with_a_nan_does_not_load(name: str, value: float, tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = tensors_of(tmp_path)
    tensors[name].view(-1)[5] = value
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {re.escape(name)}: is damaged"):
        load(tmp_path)


def test_experts_read_ahead_are_those_of_their_layers(tmp_path: Path, monkeypatch) -> None:
    """As on CUDA; a dense layer in between is passed over, and a damaged expert still named."""
    write_model(tmp_path, num_hidden_layers=4, mlp_only_layers=[1])
    plain = PlainAttention(load(tmp_path)).logits(("a", [5, 6, 7]))
    made = Weights.__init__

    def ahead(self: Weights, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.read_ahead = ThreadPoolExecutor(1)

    monkeypatch.setattr(Weights, "__init__", ahead)
    assert torch.equal(PlainAttention(load(tmp_path)).logits(("a", [5, 6, 7]))[0], plain[0])
    tensors = tensors_of(tmp_path)
    tensors["model.layers.3.mlp.experts.2.up_proj.weight"][0, 1] = torch.nan
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.experts\.2\.up_proj"):
        load(tmp_path)


class Memory:
    """In place of page-locked memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1000, dtype=torch.uint8)
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("format", ["bf16", "fp8", "modelopt"])
def test_staged_weights_are_those_read_at_once(format: str, tmp_path: Path) -> None:
    """As on CUDA: shares of rows and of columns, in the stored type or another, quantised or not."""
    write_checkpoint(tmp_path, format, dense=True)
    prefix = "model.layers.1.self_attn"
    with open_checkpoint(tmp_path) as checkpoint:
        for dtype in (torch.float32, torch.bfloat16):
            plain, staged = (Weights(checkpoint, device=torch.device("cpu"), dtype=dtype) for _ in range(2))
            staged.staging = Memory()  # type: ignore[assignment]
            for rows, columns in ((whole(64), whole(64)), (Share(64, 20, 30), Share(64, 16, 48))):
                wanted = plain.linear(f"{prefix}.q_proj", rows, columns)
                found = staged.linear(f"{prefix}.q_proj", rows, columns)
                assert found.is_contiguous()
                assert torch.equal(found, wanted)
                both = {f"{prefix}.q_proj": rows, f"{prefix}.k_proj": Share(32, 8, 16)}
                assert torch.equal(staged.fused(both, columns), plain.fused(both, columns))
            head = "lm_head", Share(384, 100, 284), whole(64)
            assert torch.equal(
                staged.linear(*head, dtype=torch.float32), plain.linear(*head, dtype=torch.float32)
            )


@pytest.mark.parametrize("damaged", [False, True])
def test_staging_memory_is_freed_when_all_is_read(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    plain = PlainAttention(load(tmp_path)).logits(("a", [5, 6, 7]))
    made, memory = Weights.__init__, Memory()

    def staged(self: Weights, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.staging = memory  # type: ignore[assignment]

    monkeypatch.setattr(Weights, "__init__", staged)
    if damaged:
        tensors = tensors_of(tmp_path)
        tensors["model.layers.1.self_attn.o_proj.weight"][0, 1] = torch.nan
        save(tmp_path, tensors)
        with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj.*at \[0, 1\]"):
            load(tmp_path)
    else:
        assert torch.equal(PlainAttention(load(tmp_path)).logits(("a", [5, 6, 7]))[0], plain[0])
    assert memory.memory.any()
    assert memory.closed


MEASURE = """
import json, sys
from pathlib import Path
import torch
from tests.models.running import load
from turnout.parallel.groups import Group, Groups
from turnout.parallel.topology import Topology
ranks = int(sys.argv[3])
last = Group(range(ranks), ranks - 1)
groups = Groups(topology=Topology(tp_size=ranks, rank=ranks - 1), world=last, attention_tp=last)
torch.set_num_threads(1)
torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the BLAS library's own buffers
warm, big = map(Path, sys.argv[1:3])
load(warm, groups=groups)
status = lambda: dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
# Not getrusage: that high-water mark is inherited from the process that started this one.
peak = lambda: 1024 * int(status()["VmHWM"].split()[0])
before = peak()
model = load(big, groups=groups)
print(json.dumps(peak() - before))
"""


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        pytest.param(torch.float32, 1, marks=pytest.mark.more),
        pytest.param(torch.bfloat16, 1, marks=pytest.mark.more),
        (torch.bfloat16, 2),
    ],
    ids=str,
)
def test_peak_memory_stays_near_the_weights(dtype: torch.dtype, ranks: int, tmp_path: Path) -> None:
    """Tensors are read one at a time, so loading needs little beyond the weights it leaves behind: for a
    shard of each expert, the whole experts of one layer as stored."""
    write_model(tmp_path / "warm")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 384, "num_experts": 16, "num_hidden_layers": 8}
    write_random(tmp_path / "big", tiny("qwen3", **sizes), dtype)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), str(tmp_path / "big"), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held = 4 * sum(t.numel() for t in tensors_of(tmp_path / "big").values())  # in float32
    assert held > 150e6
    needed = held / ranks
    assert needed / 2 < json.loads(done.stdout) < 1.3 * needed


def write_random(folder: Path, config: dict, dtype: torch.dtype) -> None:
    """A checkpoint of these sizes; written without a transformers model, which would be slower."""
    H, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    tensors: dict[str, Tensor] = {}
    for name, parameter in empty_model(config).named_parameters():
        if ".experts." not in name:
            tensors[name] = torch.rand(parameter.shape, dtype=dtype)
            continue
        prefix = name.rpartition(".")[0]
        for e in range(parameter.shape[0]):
            tensors[f"{prefix}.{e}.gate_proj.weight"] = torch.rand(intermediate, H, dtype=dtype)
            tensors[f"{prefix}.{e}.up_proj.weight"] = torch.rand(intermediate, H, dtype=dtype)
            tensors[f"{prefix}.{e}.down_proj.weight"] = torch.rand(H, intermediate, dtype=dtype)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors)
