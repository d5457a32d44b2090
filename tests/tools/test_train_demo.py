"""What made the demo model: the training model is transformers' Qwen3-MoE, batches and formats are right."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.models.running import PlainAttention, load
from tools.demo import fakequant
from tools.demo.data import IGNORE, Batch, lay_out
from tools.demo.export import decoded, load_parameters, make_model, save_parameters, write_folder
from tools.demo.measure import KVCache
from tools.demo.model import DemoModel, Quantization, Shape, causal_attention
from tools.demo.optimizer import make_optimizers, orthogonalize
from tools.demo.released import HybridShape, LatentShape
from tools.demo.released_v4 import StreamShape
from tools.train_demo import check
from turnout.checkpoint.quantize import InputAmax, quantize
from turnout.formats import mxfp4, nvfp4

SHAPE = Shape(vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, expert_width=32)


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(0)
    model = DemoModel(SHAPE, torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p) if "norm" in name else 0)
            p.copy_(p.bfloat16())
    return model


def logits(model: DemoModel, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    out = model(ids, torch.arange(len(ids)) - start, causal_attention(len(ids), start))
    return model.logits(out.hidden)


def test_exported_checkpoint_is_the_same_model(model, tmp_path):
    write_folder(model, tmp_path, end_id=2, pad_id=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SHAPE.vocab, (40,))
    ours = logits(model, ids, torch.zeros(40, dtype=torch.long))
    torch.testing.assert_close(ours, theirs(ids[None]).logits[0], atol=1e-5, rtol=1e-4)


def test_documents_laid_end_to_end_do_not_see_each_other(model):
    ids = torch.randint(0, SHAPE.vocab, (30,))
    start = torch.tensor([0] * 12 + [12] * 18)
    apart = logits(model, ids[12:], torch.zeros(18, dtype=torch.long))
    torch.testing.assert_close(logits(model, ids, start)[12:], apart, atol=1e-5, rtol=1e-4)


def test_cached_steps_equal_one_pass(model):
    ids = torch.randint(0, SHAPE.vocab, (10,))
    cache = KVCache(model, 1)
    stepped = []
    with torch.inference_mode():
        for i in range(10):
            cache.length = i + 1
            stepped.append(model.logits(model(ids[i : i + 1], torch.tensor([i]), cache.attend).hidden))
    expected = logits(model, ids, torch.zeros(10, dtype=torch.long))
    torch.testing.assert_close(torch.cat(stepped), expected, atol=1e-5, rtol=1e-4)


def test_only_tokens_of_answers_are_targets():
    documents = [
        [([1, 2, 3], False), ([4, 5], True)],
        [([6], False), ([7], True), ([8], False), ([9], True)],
        [([10], False), ([11, 12, 13], True)],
    ]
    batch = lay_out([documents], row=12)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    n = IGNORE
    assert batch.target.tolist() == [n, n, 4, 5, n, 7, n, 9, n, 11, 12, n]
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.start.tolist() == [0] * 5 + [5] * 4 + [9] * 3
    assert batch.starts.tolist()[:4] == [0, 5, 9, 12]
    two = lay_out([documents[:1], documents[1:]], row=5)
    assert two.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert two.target.tolist() == [n, n, 4, 5, n, 7, n, 9, n, n]
    assert two.start.tolist() == [0] * 5 + [5] * 4 + [9]


def test_fake_quantisation_is_what_the_formats_restore():
    w = torch.randn(4, 32, 64) * torch.logspace(-4, 4, 4)[:, None, None]
    w[0, 0, :32] = 0
    mx = fakequant.weight(w, torch.tensor(fakequant.MXFP4), lead=1)
    assert torch.equal(mx, w + (mxfp4.decode(*mxfp4.encode(w)) - w))
    scale = nvfp4.global_scale(w, lead=1)
    nv = fakequant.weight(w, torch.tensor(fakequant.NVFP4), lead=1)
    torch.testing.assert_close(nv, nvfp4.decode(*nvfp4.encode(w, scale), scale), atol=0, rtol=1e-5)
    assert torch.equal(fakequant.weight(w, torch.tensor(fakequant.BF16), lead=1), w)


def test_gradients_pass_straight_through_quantisation(model):
    quant = Quantization(torch.tensor([fakequant.NVFP4, fakequant.MXFP4]), torch.full((2, 2), 4.0))
    ids = torch.randint(0, SHAPE.vocab, (20,))
    out = model(ids, torch.arange(20), causal_attention(20, torch.zeros(20, dtype=torch.long)), quant)
    model.logits(out.hidden).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.any(), name
    model.zero_grad()


def test_parameters_survive_their_files(model, tmp_path):
    save_parameters(model, tmp_path)
    again = DemoModel(SHAPE, torch.float32)
    load_parameters(again, tmp_path)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 16)])
def test_orthogonalize(shape):
    """The iteration leaves singular values between about 0.7 and 1.2, by design."""
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


RELEASED = {
    "glm4_moe_lite": LatentShape(vocab=96, hidden=64, layers=2, experts=8, dense_width=96, query_rank=32),
    "deepseek_v4": StreamShape(
        vocab=96, hidden=64, layers=4, experts=8, query_rank=32, window=12, hash_layers=1, index_topk=8
    ),
    "qwen3_next": HybridShape(vocab=96, hidden=64, layers=4, experts=8, key_heads=2, value_heads=4),
}


def batch_of(ids: torch.Tensor, start: torch.Tensor) -> Batch:
    return Batch(ids, ids.roll(-1), torch.arange(len(ids)) - start, start, start.unique().int())


@pytest.fixture(scope="module", params=RELEASED)
def released(request, tmp_path_factory):
    """(model, its exported checkpoint); every norm, bias and decay is random."""
    torch.manual_seed(0)
    model = make_model(request.param, torch.float32, **asdict(RELEASED[request.param])).eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            p.copy_(p.bfloat16()) if "rope" not in name else None
    folder = tmp_path_factory.mktemp(request.param)
    write_folder(model, folder, end_id=2, pad_id=0)
    return model, folder


@torch.inference_mode()
def test_released_checkpoints_are_what_was_trained_here_and_in_transformers(released):
    model, folder = released
    ids = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(1))
    mine = model.logits(model(batch_of(ids, torch.zeros(150, dtype=torch.long))).hidden)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(mine, theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    (served,) = PlainAttention(load(folder)).logits(("a", ids.tolist()))
    torch.testing.assert_close(mine, served, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"architecture": "qwen3_next", "tokens": 1500}, "rows of 512 tokens, on 1 ranks"),
        ({"architecture": "deepseek_v4", "layers": 7}, "kinds of attention for 6"),
    ],
)
def test_sizes_that_would_be_cut_are_refused(flags: dict[str, Any], told: str) -> None:
    usual = {"architecture": "qwen3_moe", "tokens": 1024, "layers": None, "quantized_share": 0.4, "to": 1.0}
    with pytest.raises(SystemExit, match=told):
        check(Namespace(**usual | flags))
    check(Namespace(**usual | {"tokens": 1500}))


def test_weights_are_decoded_and_nothing_is_left_out(released, tmp_path: Path) -> None:
    """Of every architecture, whatever its other tensors are called: scales of streams, for one."""
    model, folder = released
    largest = InputAmax(1.0, 1.0)
    moe = "layers" if "layers.0.ffn.gate.weight" in model.state_dict() else "model.layers"
    part = "ffn" if moe == "layers" else "mlp"
    seen = {f"{moe}.{i}.{part}.experts.{e}": largest for i in model.shape.moe_layers for e in range(8)}
    quantize(folder, tmp_path / "nvfp4", "nvfp4", calibration=seen)
    decoded(tmp_path / "nvfp4", tmp_path / "bf16")
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "bf16"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if ".experts." in name:
            assert (after[name].float() - tensor.float()).norm() < 0.15 * tensor.float().norm(), name
        else:
            assert torch.equal(after[name], tensor), name


@torch.inference_mode()
def test_the_draft_layer_is_what_transformers_makes_of_it(released):
    model, folder = released
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3))
    out = model(batch_of(ids, torch.zeros(40, dtype=torch.long)))
    L = model.shape.layers
    tensors = {
        n: t.float() for n, t in load_file(folder / "model.safetensors").items() if f"layers.{L}." in n
    }
    assert (out.drafted is None) == (not tensors)
    if out.drafted is None:
        return
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
    theirs = MtpModel(main, 1).eval()
    block = theirs.layers[0].mtp_block.mlp.experts
    for e in range(model.shape.experts):
        gate, up, down = (
            tensors.pop(f"model.layers.{L}.mlp.experts.{e}.{part}_proj.weight")
            for part in ("gate", "up", "down")
        )
        block.gate_up_proj[e], block.down_proj[e] = torch.cat((gate, up)), down
    outer = {"enorm", "hnorm", "eh_proj"}
    renamed = {
        n.removeprefix(f"model.layers.{L}.").replace("shared_head.norm", "post_norm"): t
        for n, t in tensors.items()
    }
    state = {
        n if n.split(".")[0] in outer | {"post_norm"} else f"mtp_block.{n}": t for n, t in renamed.items()
    }
    missing, unexpected = theirs.layers[0].load_state_dict(state, strict=False)
    assert not unexpected
    assert {name.rpartition(".")[2] for name in missing} == {"gate_up_proj", "down_proj"}
    positions = torch.arange(39)[None]
    expected = theirs.forward_layer(0, out.hidden[None, :-1], positions, None, input_ids=ids[None, 1:])[0]
    torch.testing.assert_close(out.drafted[:-1], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_documents_and_rows_of_released_models_do_not_see_each_other(released, monkeypatch):
    monkeypatch.setattr("tools.demo.released.ROW", 100)
    model, _ = released
    ids = torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(2))
    start = torch.tensor([0] * 70 + [70] * 30 + [100] * 100)
    both = model.logits(model(batch_of(ids, start)).hidden)
    for first, end in ((0, 70), (70, 100), (100, 200)):
        zeros = torch.zeros(end - first, dtype=torch.long)
        apart = model.logits(model(batch_of(ids[first:end], zeros)).hidden)
        torch.testing.assert_close(both[first:end], apart, atol=1e-4, rtol=1e-4)


@pytest.mark.more
def test_a_few_steps_of_training_lower_the_loss_of_every_part(released, monkeypatch):
    monkeypatch.setattr("tools.demo.released.ROW", 128)
    model = type(released[0])(released[0].shape, torch.float32)
    ids = torch.arange(256) * 7 % 96
    batch = batch_of(ids, torch.arange(256) // 128 * 128)
    optimizers = make_optimizers(model, weight_decay=0.1)
    count = len(model.shape.moe_layers)
    quant = Quantization(torch.full((count,), fakequant.NVFP4), torch.full((count, 2), 8.0))
    losses = []
    for _ in range(12):
        out = model(batch, quant)
        parts = [out.hidden] + ([out.drafted] if out.drafted is not None else [])
        loss = sum(torch.nn.functional.cross_entropy(model.logits(h), batch.target) for h in parts)
        (loss + 0.01 * out.balance).backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        model.zero_grad()
        model.even_out(out.load)
    assert losses[-1] < 0.5 * losses[0]
