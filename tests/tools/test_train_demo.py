"""What made the demo model: the training model is transformers' Qwen3-MoE, batches and formats are right."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.demo import fakequant
from tools.demo.data import IGNORE, lay_out
from tools.demo.export import load_parameters, save_parameters, write_folder
from tools.demo.measure import KVCache
from tools.demo.model import DemoModel, Quantization, Shape, causal_attention
from tools.demo.optimizer import orthogonalize
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
    batch = lay_out(documents, tokens=12)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    n = IGNORE
    assert batch.target.tolist() == [n, n, 4, 5, n, 7, n, 9, n, 11, 12, 13]
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.start.tolist() == [0] * 5 + [5] * 4 + [9] * 3
    assert batch.starts.tolist()[:4] == [0, 5, 9, 12]


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
