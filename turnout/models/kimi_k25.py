"""Kimi-K2.5 and K2.6, their text part: DeepSeek-V3 below `text_config`."""

from __future__ import annotations

from dataclasses import replace

from turnout.models.deepseek_v3 import NAMES as TEXT
from turnout.models.deepseek_v3 import read_deepseek
from turnout.models.fields import ConfigFields
from turnout.models.reading import read_draft_layers
from turnout.models.spec import DecoderSpec, Skipped

NAMES = replace(TEXT, model="language_model.model", head="language_model.lm_head")
VISION = (
    Skipped(what="vision tower", prefix="vision_tower."),
    Skipped(what="vision projector", prefix="mm_projector."),
)


def read_spec(fields: ConfigFields) -> DecoderSpec:
    text = fields.nested("text_config")
    text.choice("model_type", ("deepseek_v3", "kimi_k2"), default="deepseek_v3")
    text.unused("tie_word_embeddings")  # the model's own flag counts
    fields.unused(
        "vision_config", "image_token_id", "video_token_id", "media_placeholder_token_id",
        "vision_start_token_id", "vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps",
        "ignore_index", "use_unified_vision_chunk", "video_placeholder",
    )  # fmt: skip
    spec = read_deepseek(text, architecture="KimiK25ForConditionalGeneration")
    eos_token_ids = fields.integers("eos_token_id", spec.shape.eos_token_ids)
    return replace(
        spec,
        shape=replace(spec.shape, eos_token_ids=eos_token_ids),
        names=NAMES,
        skipped=VISION + read_draft_layers(text, NAMES, spec.shape.num_layers),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )
