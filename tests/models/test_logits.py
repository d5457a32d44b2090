"""Logits equal transformers' in float32, for every variant of the architectures, however tokens arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.writers import edit_config
from tests.models.configs import BASES
from tests.models.running import PlainAttention, load
from tests.tiny import write_model

BOUND = 1e-4  # absolute
LENGTH = 150  # beyond the trained length of the RoPE variants below
TRAINED = 40

SHORT = [1.0 + 0.3 * i for i in range(8)]
ROPE = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "short_factor": SHORT,
        "long_factor": [9.0] * 8,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
    },
}
VARIANTS = {
    "qwen3": ("qwen3", {}),
    "qwen3 norm_topk_prob off": ("qwen3", {"norm_topk_prob": False}),
    "qwen3 every second layer": ("qwen3", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3 mlp_only_layers": ("qwen3", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 attention_bias": ("qwen3", {"attention_bias": True}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 24}),
    "qwen3 one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 large eps": ("qwen3", {"rms_norm_eps": 0.05}),
    "qwen3 rope_theta": ("qwen3", {"rope_theta": 500.0}),
    "qwen2": ("qwen2", {}),
    "qwen2 norm_topk_prob off": ("qwen2", {"norm_topk_prob": False}),
    "qwen2 no qkv_bias": ("qwen2", {"qkv_bias": False}),
    "qwen2 mixed layers": (
        "qwen2",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 wide window": ("qwen2", {"use_sliding_window": True, "sliding_window": 512}),
    "qwen2 window": (
        "qwen2",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 3},
    ),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 33}),
    **{f"rope {kind}": ("qwen3", {"rope_scaling": {"rope_type": kind} | p}) for kind, p in ROPE.items()},
    "qwen2 rope yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn"} | ROPE["yarn"]}),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(model, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    base, overrides = VARIANTS[name]
    theirs = write_model(tmp_path, BASES[base], **overrides)
    ids, other = prompt(LENGTH), prompt(17, seed=1)
    expected = reference(theirs, ids)
    model = load(tmp_path)

    together = PlainAttention(model).logits(("a", ids), ("b", other))
    assert error(together[0], expected) <= BOUND
    assert error(together[1], reference(theirs, other)) <= BOUND

    run = PlainAttention(model)
    parts = [run.logits(("a", ids[:60]))[0], run.logits(("a", ids[60:130]))[0]]
    for i in range(130, LENGTH):
        parts.append(run.logits(("a", ids[i : i + 1]), phase="decode")[0])
    assert error(torch.cat(parts), expected) <= BOUND


@pytest.mark.parametrize(
    "edit",
    [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 3},
        {"rms_norm_eps": 0.05},
        {"rope_parameters": {"rope_theta": 500.0}},
        *({"rope_parameters": {"rope_type": kind} | ROPE[kind]} for kind in ROPE if kind != "dynamic"),
    ],
    ids=str,
)
def test_fields_change_the_logits(edit: dict, tmp_path: Path) -> None:
    """The bound above is tight enough to notice each of them being ignored."""
    theirs = write_model(tmp_path)
    with edit_config(tmp_path) as config:
        config.update(edit)
    ids = prompt(LENGTH)
    (logits,) = PlainAttention(load(tmp_path)).logits(("a", ids))
    assert error(logits, reference(theirs, ids)) > 100 * BOUND


@pytest.mark.parametrize("base", BASES)
def test_token_by_token_in_changing_batches(base: str, tmp_path: Path) -> None:
    """Every token from the first one alone, in steps with sequences that come and go."""
    theirs = write_model(tmp_path, BASES[base])
    run = PlainAttention(load(tmp_path))
    ids, others = prompt(24), [prompt(24, seed=s) for s in (1, 2)]
    got: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
    for i in range(24):
        chunks = [("a", ids[i : i + 1])]
        if i % 2:
            chunks.append(("b", others[0][i // 2 : i // 2 + 1]))
        if i > 11:
            chunks.insert(0, ("c", others[1][i - 12 : i - 11]))
        for (name, _), logits in zip(chunks, run.logits(*chunks, phase="decode"), strict=True):
            got[name].append(logits)
    assert error(torch.cat(got["a"]), reference(theirs, ids)) <= BOUND
    assert error(torch.cat(got["b"]), reference(theirs, others[0][:12])) <= BOUND
    assert error(torch.cat(got["c"]), reference(theirs, others[1][:12])) <= BOUND


@pytest.mark.parametrize("base", BASES)
def test_no_tokens_is_an_ordinary_step(base: str, tmp_path: Path) -> None:
    write_model(tmp_path, BASES[base], num_hidden_layers=3, mlp_only_layers=[1])
    (logits,) = PlainAttention(load(tmp_path)).logits(("a", []))
    assert logits.shape == (0, 384)


def test_expert_counts(tmp_path: Path) -> None:
    """Against the routers of transformers' model, over two steps; dense layers have no entry."""
    theirs = write_model(tmp_path, num_hidden_layers=3, mlp_only_layers=[1])
    expected = torch.zeros(2, 8, dtype=torch.int64)

    def count(row: int, ids_TK: Tensor) -> None:
        expected[row] += torch.bincount(ids_TK.flatten(), minlength=8)

    for row, i in enumerate((0, 2)):
        gate = theirs.model.layers[i].mlp.gate
        gate.register_forward_hook(lambda _, __, out, row=row: count(row, out[2]))
    ids = prompt(50)
    reference(theirs, ids)
    model = load(tmp_path)
    run = PlainAttention(model)
    run.logits(("a", ids[:49]))
    run.logits(("a", ids[49:]), phase="decode")
    assert model.expert_counts() == expected.tolist()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(base: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No further from the float32 truth than transformers in the same type is, up to a third."""
    exact = write_model(tmp_path, BASES[base])
    ids = prompt(64)
    expected = reference(exact, ids)
    (logits,) = PlainAttention(load(tmp_path, dtype)).logits(("a", ids))
    assert logits.dtype == torch.float32
    rounded = exact.to(dtype)
    ours, theirs = ((x - expected).square().mean().sqrt() for x in (logits, reference(rounded, ids)))
    assert ours <= theirs * 4 / 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen2 mixed layers", "rope yarn"])
def test_logits_on_a_gpu(name: str, tmp_path: Path) -> None:
    base, overrides = VARIANTS[name]
    expected = reference(write_model(tmp_path, BASES[base], **overrides), ids := prompt(LENGTH))
    run = PlainAttention(load(tmp_path, device="cuda"), "cuda")
    parts = [run.logits(("a", ids[:140]))[0]]
    parts += [run.logits(("a", [i]), phase="decode")[0] for i in ids[140:]]
    assert error(torch.cat(parts), expected) <= BOUND
