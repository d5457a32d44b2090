"""Qwen3.5-MoE and Qwen3.6-MoE, the text part: Qwen3-Next with projections of DeltaNet stored apart."""

from __future__ import annotations

from dataclasses import replace

from turnout.models.fields import ConfigFields
from turnout.models.qwen3_next import read_hybrid
from turnout.models.spec import DecoderSpec, Skipped, TensorNames

NESTED = TensorNames(model="model.language_model")
VISION = Skipped(what="vision tower", prefix="model.visual.")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    """Of the whole model, whose text fields are below `text_config`."""
    text = fields.nested("text_config")
    fields.unused("vision_config", "image_token_id", "video_token_id")
    fields.unused("vision_start_token_id", "vision_end_token_id", "language_model_only")
    text.unused("tie_word_embeddings")  # the model's own flag counts
    spec = _read(text, "Qwen3_5MoeForConditionalGeneration")
    tied = fields.flag("tie_word_embeddings", False)
    return replace(spec, names=NESTED, skipped=(VISION, *spec.skipped), tied_embeddings=tied)


def read_text_spec(fields: ConfigFields) -> DecoderSpec:
    """Of the text model by itself."""
    spec = _read(fields, "Qwen3_5MoeForCausalLM")
    return replace(spec, tied_embeddings=fields.flag("tie_word_embeddings", False))


def _read(fields: ConfigFields, architecture: str) -> DecoderSpec:
    fields.choice("norm_topk_prob", (True,), default=True)
    return read_hybrid(fields, architecture=architecture, renormalize=True)
