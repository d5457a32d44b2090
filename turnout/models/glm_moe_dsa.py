"""GLM-5, 5.1 and 5.2: sparse latent attention as DeepSeek-V3.2's, whose choices layers may share."""

from __future__ import annotations

from turnout.models.deepseek_v3 import read_deepseek
from turnout.models.deepseek_v32 import FULL, SHARED, with_indexers
from turnout.models.fields import ConfigFields
from turnout.models.spec import DecoderSpec


def read_spec(fields: ConfigFields) -> DecoderSpec:
    spec = read_deepseek(fields, architecture="GlmMoeDsaForCausalLM", norm_eps=1e-5, drafts=False)
    return with_indexers(
        fields, spec, interleaved=True, kinds=_read_indexer_types(fields, spec.shape.num_layers)
    )


def _read_indexer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    """Of each layer: in a list, in letters, or every so many layers behind the first ones."""
    every, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2)
    name, kinds = "index_topk_freq", _every(num_layers, every, offset)
    for listed in ("index_topk_pattern", "indexer_types"):  # the last of them counts
        value = fields.raw(listed)
        if value is not None and not isinstance(value, str | list):
            raise fields.wrong(listed, f"must say 'full' or 'shared' (F or S) of {num_layers} layers")
        if value is not None:
            letters = {"F": FULL, "S": SHARED}
            name, kinds = listed, [letters.get(kind, kind) for kind in value]
    if len(kinds) != num_layers or set(kinds) - {FULL, SHARED}:
        raise fields.wrong(name, f"must say 'full' or 'shared' (F or S) of {num_layers} layers")
    if kinds[0] != FULL:
        raise fields.wrong(name, "must begin with a full layer: there is no choice before it to share")
    return kinds


def _every(num_layers: int, every: int, offset: int) -> list[str]:
    return [FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(num_layers)]
