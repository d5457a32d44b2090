"""Qwen3-VL-MoE, its text part: Qwen3-MoE below `text_config`, with all experts of a layer in one tensor."""

from __future__ import annotations

from dataclasses import replace

from turnout.models.fields import ConfigFields
from turnout.models.qwen3_moe import read_qwen
from turnout.models.reading import read_head_dim
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, Skipped, TensorNames
from turnout.vocabulary import QKNorm

NAMES = TensorNames(model="model.language_model")
VISION = Skipped(what="vision tower", prefix="model.visual.")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    text = fields.nested("text_config")
    text.choice("norm_topk_prob", (True,), default=True)
    text.unused("tie_word_embeddings")  # the model's own flag counts
    fields.unused("vision_config", "image_token_id", "video_token_id")
    fields.unused("vision_start_token_id", "vision_end_token_id")
    bias = text.flag("attention_bias", False)
    spec = read_qwen(
        text,
        architecture="Qwen3VLMoeForConditionalGeneration",
        rope=read_rope(text, head_dim=read_head_dim(text), theta=5e5, mrope=True),
        renormalize=True,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.HEAD,
    )
    tied = fields.flag("tie_word_embeddings", False)
    return replace(spec, names=NAMES, skipped=(VISION,), tied_embeddings=tied)
