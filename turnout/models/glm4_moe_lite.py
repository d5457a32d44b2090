"""GLM-4.7-Flash: DeepSeek-V3 in small, with one group of experts and larger heads."""

from __future__ import annotations

from turnout.models.deepseek_v3 import read_deepseek
from turnout.models.fields import ConfigFields
from turnout.models.spec import DecoderSpec


def read_spec(fields: ConfigFields) -> DecoderSpec:
    return read_deepseek(
        fields, architecture="Glm4MoeLiteForCausalLM", first_dense=1, scaling_factor=1.8, norm_eps=1e-5
    )
