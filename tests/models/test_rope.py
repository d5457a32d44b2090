"""Rotary embedding against transformers' own, for every variant and both ways to write it down."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.tiny import QWEN3_MOE
from turnout.errors import UserError
from turnout.models.blocks import RotaryEmbedding, rotate
from turnout.models.fields import ConfigFields
from turnout.models.rope import Rope, read_rope

HEAD_DIM = 64
BASE = QWEN3_MOE | {"head_dim": HEAD_DIM, "max_position_embeddings": 2048}
SHORT = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
LONG = [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)]

VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn without the trained length": {"rope_type": "yarn", "factor": 2.0},
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 20,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn with attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 512,
    },
    "longrope with factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 32.0,
        "original_max_position_embeddings": 512,
    },
}


def read(rope_field: str, parameters: dict | None, **fields) -> Rope:
    config = BASE | {rope_field: parameters} | fields
    return read_rope(ConfigFields(config), head_dim=HEAD_DIM)


def cos_sin(rope: Rope, positions: torch.Tensor, dtype=torch.float32):
    return RotaryEmbedding(rope, device=torch.device("cpu"), dtype=dtype)(positions)


@pytest.mark.parametrize("legacy", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", VARIANTS)
def test_rotation_equals_transformers(name: str, legacy: bool) -> None:
    parameters, theta = VARIANTS[name], 50000.0
    if legacy:
        parameters = parameters | {"type": parameters["rope_type"]}
        parameters.pop("rope_type")
        ours = read("rope_scaling", dict(parameters), rope_theta=theta)
        config = AutoConfig.for_model(**BASE, rope_scaling=dict(parameters), rope_theta=theta)
    else:
        parameters = parameters | {"rope_theta": theta}
        ours = read("rope_parameters", dict(parameters))
        config = AutoConfig.for_model(**BASE, rope_parameters=dict(parameters))
    last = min(ours.max_positions, BASE["max_position_embeddings"]) - 1
    positions = torch.cat((torch.arange(0, last, 37), torch.tensor([last])))
    torch.manual_seed(0)
    q, k = torch.randn(2, len(positions), 3, HEAD_DIM)

    cos, sin = Qwen3MoeRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)

    for x, reference in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotate(x, *cos_sin(ours, positions)), reference[0], atol=5e-4, rtol=0)
    frequencies = RotaryEmbedding(ours, device=torch.device("cpu"), dtype=torch.float32)._frequencies
    torch.testing.assert_close(frequencies, Qwen3MoeRotaryEmbedding(config).inv_freq, rtol=3e-7, atol=0)


def test_plain_embedding_is_bit_equal_to_transformers() -> None:
    positions = torch.arange(0, 40960, 17)
    cos, sin = Qwen3MoeRotaryEmbedding(AutoConfig.for_model(**BASE))(torch.empty(1), positions[None])
    ours_cos, ours_sin = cos_sin(read("rope_parameters", None), positions)
    half = HEAD_DIM // 2
    assert torch.equal(ours_cos[:, 0], cos[0])
    assert torch.equal(ours_sin[:, 0, half:], sin[0, :, half:])
    assert torch.equal(ours_sin[:, 0, :half], -sin[0, :, :half])


def test_rotation_depends_on_distance_only() -> None:
    """q(m) . k(n) is a function of m - n: the property that RoPE is for."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64)
    rope = read("rope_scaling", VARIANTS["yarn"])

    def score(m: int, n: int) -> float:
        rotated = [rotate(x, *cos_sin(rope, torch.tensor([p]), torch.float64)) for x, p in ((q, m), (k, n))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(507, 503), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 5), abs=1e-3)


def test_no_tokens() -> None:
    cos, sin = cos_sin(read("rope_scaling", None), torch.empty(0, dtype=torch.int64))
    assert rotate(torch.empty(0, 3, HEAD_DIM), cos, sin).shape == (0, 3, HEAD_DIM)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("default", 2048),
        ("dynamic", 2048),  # its frequencies change beyond
        ("yarn", 2048),
        ("yarn without the trained length", 4096),  # factor times max_position_embeddings
        ("longrope", 512),  # the short set, where it is exact
    ],
)
def test_context_that_is_served(name: str, context: int) -> None:
    assert read("rope_scaling", VARIANTS[name]).max_positions == context


def test_trained_length_may_stand_outside() -> None:
    """As Phi-3 has it, where it takes precedence."""
    inside = read("rope_scaling", VARIANTS["llama3"])
    outside = VARIANTS["llama3"] | {"original_max_position_embeddings": 1}
    both = read("rope_scaling", outside, original_max_position_embeddings=512)
    plain = torch.rand(HEAD_DIM // 2)
    assert torch.equal(inside.adjust(plain), both.adjust(plain))


def change(name: str, **fields) -> dict:
    return {k: v for k, v in (VARIANTS[name] | fields).items() if v is not ...}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "su"}, "rope_type 'su' is not implemented; known: default, linear, dynamic, yarn"),
        ({"rope_type": "mrope", "mrope_section": [8, 12, 12]}, "rope_type 'mrope'"),
        ({"rope_type": ["yarn"]}, "rope_type .*yarn.* is not implemented"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "mrope_section = "),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}, "alpha = 1000"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        (change("linear", factor=...), "factor is missing"),
        (change("linear", factor=0), "factor = 0: must be a number of at least 1"),
        (change("linear", factor="2"), "factor = '2'"),
        (change("linear", factor=float("nan")), "factor = nan"),
        (change("dynamic", factor=...), "factor is missing"),
        (change("llama3", high_freq_factor=0.5), "high_freq_factor = 0.5: must be at least low_freq_factor"),
        (change("llama3", low_freq_factor=...), "low_freq_factor is missing"),
        (change("longrope", short_factor=SHORT[:-1]), f"short_factor = .*list of {HEAD_DIM // 2}"),
        (change("longrope", long_factor=...), "long_factor is missing"),
        (change("yarn", original_max_position_embeddings=-512), "original_max_position_embeddings = -512"),
        (change("yarn", truncate="no"), "truncate = 'no'"),
        (change("yarn", rope_theta=1), "rope_theta = 1"),
        ([1.0], "must be an object"),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_refused_by_name(field: str, parameters: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(field, parameters)


def test_contradicting_fields_and_odd_heads_are_refused() -> None:
    with pytest.raises(UserError, match="contradicts rope_parameters"):
        read("rope_scaling", VARIANTS["linear"], rope_parameters=VARIANTS["yarn"])
    with pytest.raises(UserError, match="even head size"):
        read_rope(ConfigFields(BASE), head_dim=15)


NUMBERS = st.floats() | st.integers() | st.sampled_from([0, 1, -1, 1e-300, 1e300])
NAMES = sorted({name for fields in VARIANTS.values() for name in fields} - {"rope_type"} | {"rope_theta"})


@settings(max_examples=300, deadline=None)
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    edits=st.dictionaries(st.sampled_from(NAMES), NUMBERS, min_size=1, max_size=2),
)
def test_any_number_gives_finite_frequencies_or_a_refusal(variant: str, edits: dict) -> None:
    try:
        rope = read("rope_parameters", VARIANTS[variant] | edits)
    except UserError:
        return
    frequencies = RotaryEmbedding(rope, device=torch.device("cpu"), dtype=torch.float32)._frequencies
    assert frequencies.isfinite().all()
    assert math.isfinite(rope.scaling)
    assert rope.max_positions > 0
