"""Names of parsers, and which family a model is of."""

from __future__ import annotations

import pytest

from tests.server.api.parsing.formats import PUBLISHED
from turnout.errors import UserError
from turnout.server.api.parsing.registry import CALL_PARSERS, FAMILIES, REASONING_PARSERS, Parsers, family_of

# What people pass to other engines: --tool-call-parser and --reasoning-parser of SGLang, then of vLLM.
ELSEWHERE = {
    "gpt_oss": (("gpt-oss", "openai"), ("gpt-oss", "openai_gptoss")),
    "deepseek_v3": (("deepseekv3", "deepseek_v3"), ("deepseek-r1", "deepseek_r1", "deepseek-v3")),
    "deepseek_v31": (("deepseekv31", "deepseek_v31"), ()),
    "deepseek_v32": (("deepseekv32", "deepseek_v32"), ()),
    "deepseek_v4": (("deepseekv4", "deepseek_v4"), ("deepseek-v4", "deepseek_v4")),
    "glm45": (("glm45", "glm47"), ("glm45", "glm47")),
    "kimi_k2": (("kimi_k2",), ("kimi_k2",)),
    "minimax_m2": (("minimax-m2", "minimax_m2"), ("minimax", "minimax_m2")),
    "qwen3": (("qwen", "qwen25", "hermes"), ("qwen3", "qwen3-thinking")),
    "qwen3_coder": (("qwen3_coder", "qwen3_xml"), ()),
}


@pytest.mark.parametrize("family", sorted(ELSEWHERE))
def test_other_engines_names(family: str):
    calls, reasoning = ELSEWHERE[family]
    for name in (family, *calls):
        assert Parsers.chosen(name, "none").calls is CALL_PARSERS[family]
    for name in reasoning:
        found = Parsers.chosen("none", name).reasoning
        assert found is REASONING_PARSERS[name.replace("-", "_")]
        assert found.harmony == (family == "gpt_oss")


def test_no_name_means_two_families():
    for names in ("names", "reasoning_names"):
        every = [name for family in FAMILIES for name in getattr(family, names)]
        assert len(every) == len(set(every))


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_auto_goes_by_the_chat_template(family: str):
    template = PUBLISHED[family].template
    found = Parsers.chosen("auto", "auto", template=template)
    assert found.calls is CALL_PARSERS[family]
    assert found.reasoning is CALL_PARSERS[family]
    assert Parsers.chosen("none", "none", template=template) == Parsers()


def test_auto_without_signs():
    assert Parsers.chosen("auto", "auto", template="{{ messages }}", model_type="qwen3_moe") == Parsers()
    assert Parsers.chosen("auto", "auto") == Parsers()
    own = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"
    assert family_of(own, "glm4_moe") is CALL_PARSERS["glm45"]
    thinks = Parsers.chosen("auto", "auto", template="{{ messages }}<think></think>")
    assert thinks.calls is None
    assert thinks.reasoning is not None


def test_unknown_and_contradicting_names():
    with pytest.raises(UserError, match="--tool-call-parser 'quen3': unknown; known: auto, none, deepseek_"):
        Parsers.chosen("quen3", "auto")
    with pytest.raises(UserError, match=r"--reasoning-parser 'pythonic': unknown; known: .*qwen3"):
        Parsers.chosen("auto", "pythonic")
    with pytest.raises(UserError, match="one is GPT-OSS's, the other is not"):
        Parsers.chosen("openai", "qwen3")
