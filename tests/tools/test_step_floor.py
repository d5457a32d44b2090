"""Operations as torch counts them while transformers computes a token; bytes as they are by hand."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tools import decode_steps
from tools.step_floor import Work, context_bytes, context_operations, work_of_step
from turnout.attention.kinds import AttentionKind, AttentionSpec, CompressedSpec, SparseLatentSpec

COMPRESSED = CompressedSpec(
    num_heads=8,
    num_kv_heads=1,
    head_dim=64,
    value_dim=64,
    scale=1.0,
    recent=8,
    rate=4,
    overlap=True,
    index_heads=4,
    index_dim=32,
    index_topk=16,
    output_groups=2,
)
SIZES = {"num_kv_heads": 1, "head_dim": 48, "value_dim": 32, "scale": 1.0, "latent_dim": 64, "rope_dim": 16}
LATENT = AttentionSpec(kind=AttentionKind.LATENT, num_heads=4, **SIZES)
SPARSE = SparseLatentSpec(num_heads=4, index_heads=2, index_dim=32, index_topk=16, **SIZES)


@pytest.mark.parametrize(
    ("spec", "tokens", "values"),
    [
        # of 8 recent tokens 64 each; entries of 4 tokens, 100, of which 16 are read and all scored by 32
        (COMPRESSED, 400, 8 * 64 + 16 * 64 + 100 * 32 + 8 * 4 * (64 + 32) / 4),
        (COMPRESSED, 40, 8 * 64 + 10 * 64 + 8 * 4 * (64 + 32) / 4),  # all 10 entries are read
        (replace(COMPRESSED, rate=0, overlap=False, index_dim=0, index_topk=0), 400, 8 * 64),
        (LATENT, 100, 100 * 80),
        (SPARSE, 100, 16 * 80 + 100 * 32),
        (replace(SPARSE, index_fp8=True), 100, 16 * 80 + 100 * (32 + 4) / 2),
        (replace(SPARSE, shares_choice=True), 100, 16 * 80),
        (SPARSE, 10, 10 * 80),
    ],
)
def test_what_a_token_reads_of_its_context(spec: AttentionSpec, tokens: int, values: float):
    assert context_bytes(spec, tokens, 2) == 2 * values


def test_operations_of_a_token_with_its_context():
    """Those of the products that absorbed attention, sparse attention and compressed attention consist of."""

    def products(*shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
        with FlopCounterMode(display=False) as counter:
            for a, b in shapes:
                torch.empty(a) @ torch.empty(b)
        return counter.get_total_flops()

    def attended(heads: int, tokens: int, keys: int, values: int) -> int:
        return products(((heads, keys), (keys, tokens)), ((heads, tokens), (tokens, values)))

    assert context_operations(LATENT, 100) == attended(4, 100, 80, 64)
    scored = products(((2, 32), (32, 100)))
    assert context_operations(SPARSE, 100) == attended(4, 16, 80, 64) + scored
    assert context_operations(replace(SPARSE, shares_choice=True), 100) == attended(4, 16, 80, 64)
    assert context_operations(SPARSE, 10) == attended(4, 10, 80, 64)  # all are chosen
    scored = products(((4, 32), (32, 100)))
    assert context_operations(COMPRESSED, 400) == attended(8, 8 + 16, 64, 64) + scored
    sizes = {"num_kv_heads": 2, "head_dim": 16, "value_dim": 8, "scale": 1.0, "window": 32}
    window = AttentionSpec(kind=AttentionKind.SLIDING_WINDOW, num_heads=4, **sizes)
    assert context_operations(window, 100) == attended(4, 32, 16, 8)


def test_a_step_of_a_whole_model(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "512")
    context = 256
    options = Namespace(device="cpu", requests=[2], eager=[], prefill=[], context=context)
    bench = decode_steps.Bench(str(tiny_folder), options)
    core, info = bench._llm._open(), bench._llm.info()
    work = work_of_step(info, core._forward._attention, 2, context)
    bench._llm.close()
    modes = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, **modes)
    with torch.inference_mode():
        past = model(torch.ones(2, context - 1, dtype=torch.int64), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 1, dtype=torch.int64), past_key_values=past)
    assert sum(part.operations for part in work.values()) == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )
    weights = sum(
        work[name].nbytes for name in work if name not in ("experts", "states", "attention, group 0")
    )
    embedding = model.get_input_embeddings().weight
    outside = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
    assert weights == pytest.approx(4 * (outside - embedding.numel()), rel=0.01)


def test_a_part_takes_as_long_as_what_takes_longer():
    assert Work(nbytes=4.2e12, operations=0).seconds == 1
    assert Work(nbytes=4.2e12, operations=2 * 790e12).seconds == 2
