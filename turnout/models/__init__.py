"""Model architectures: described from `config.json`, loaded with a plan for their MoE layers.

description = describe(config)                        # no torch, no weights
model = load_model(checkpoint, plan, groups=..., device=..., dtype=...)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from turnout.attention.kinds import SparseLatentSpec
from turnout.cache import redirect_compilers
from turnout.checkpoint import Quantization, parse_quantization
from turnout.errors import UserError
from turnout.models.fields import ConfigFields
from turnout.models.interface import ModelDescription, ProgressFn
from turnout.models.parameters import described
from turnout.models.spec import DecoderSpec
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.registry import ARCHITECTURES
from turnout.vocabulary import Format

if TYPE_CHECKING:  # describing a model must not cost the import of torch
    import torch

    from turnout.checkpoint import Checkpoint
    from turnout.models.decoder import Decoder
    from turnout.models.prepared import Prepared
    from turnout.moe.interface import Experts
    from turnout.parallel.groups import Groups

__all__ = ["describe", "load_model"]

logger = logging.getLogger(__name__)

WITHOUT_DRAFT_LAYER = "Leave --speculative-algorithm out, or use --speculative-algorithm ngram"
# Tensors that some files hold and the forward pass has no use for.
HARMLESS_TENSORS = re.compile(
    r".*\.rotary_emb\.inv_freq"  # computed from config.json
    r"|.*\.(k|v|q|kv|prob_output)_scale|.*\.[kv]_proj\.output_scale"  # of a KV cache stored in FP8
)


def describe(
    config: Mapping[str, Any],
    *,
    drafts: bool = False,
    names: Collection[str] = (),
    index_fp8: bool = False,
) -> ModelDescription:
    """The model that a parsed `config.json` names. drafts: with its draft layer. index_fp8: with index keys
    in FP8.

    names: of the checkpoint's tensors, where it is at hand: they say whether a draft layer was quantised.
    Raises UserError naming the architecture that is not implemented, or the field that is missing, malformed
    or not implemented.
    """
    spec = _read_spec(config, drafts, index_fp8)
    quantization = _as_stored(parse_quantization(config), spec, names)
    return described(_with_formats(spec, quantization), quantization.is_fp8)


def load_model(
    checkpoint: Checkpoint,
    plan: MoEPlan,
    *,
    groups: Groups,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: ProgressFn | None = None,
    make_runner: Callable[[int], Experts] | None = None,
    drafts: bool = False,
    shared: Prepared | None = None,
    index_fp8: bool = False,
) -> Decoder:
    """Read this rank's weights, one tensor at a time, into a model on `device` that computes in `dtype`.

    `plan` is the one made for `describe(checkpoint.config)` and the topology of `groups`.
    `make_runner(layer)` gives the runner of each MoE layer instead of the plan's. drafts: with its draft
    layer, as a `DraftingModel`. shared: where prepared weights may be, and are put. index_fp8: with index
    keys in FP8. Raises UserError as `describe` does and for weights that have no place in the model,
    CheckpointError for a tensor that is missing or wrong.
    """
    import torch

    if torch.device(device).type == "cuda":
        redirect_compilers()
    from turnout.models import dense
    from turnout.models.decoder_weights import DecoderReader
    from turnout.models.weights import Weights
    from turnout.moe.interface import prepare_anew

    spec = _read_spec(checkpoint.config, drafts, index_fp8)
    if drafts:
        _require_draft_layer(checkpoint, spec)
        checkpoint.quantization = _as_stored(checkpoint.quantization, spec, checkpoint.names())
    spec = _with_formats(spec, checkpoint.quantization)
    multiply = dense.invariant_linear if plan.deterministic else dense.linear
    checkpoint.rename(spec.renames)
    weights = Weights(checkpoint, device=torch.device(device), dtype=dtype, multiply=multiply)
    keep = shared.keep if shared else prepare_anew
    try:
        model = DecoderReader(spec, weights, plan, groups, make_runner, keep).read(progress or _silent)
    finally:
        weights.close()
    if shared is None or not shared.found:  # else whoever prepared them has read everything
        _skip(checkpoint, spec)
        _refuse_unread(checkpoint, spec)
    return model


def _require_draft_layer(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Quantised copies of a model may lack it, whatever their config.json says."""
    names = spec.draft_names
    assert names is not None, "a spec with a draft layer names it"
    if not checkpoint.has(f"{names.projection}.weight"):
        raise UserError(
            f"{checkpoint.folder}: tensor {names.projection}.weight is missing: the checkpoint was published "
            f"without the draft layer that config.json names. {WITHOUT_DRAFT_LAYER}"
        )
    copies = (f"{names.layer}.embed_tokens.weight", f"{names.layer}.shared_head.head.weight")
    checkpoint.set_aside(name for name in copies if checkpoint.has(name))  # of the model's own


def _read_spec(config: Mapping[str, Any], drafts: bool, index_fp8: bool) -> DecoderSpec:
    fields = ConfigFields(config)
    names = fields.raw("architectures")
    if not isinstance(names, Sequence) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", "must be a list that holds one name")
    if names[0] not in ARCHITECTURES:
        raise UserError(_unknown(names[0]))
    spec: DecoderSpec = ARCHITECTURES.get(names[0])(fields)
    fields.refuse_unread()
    if drafts and not spec.draft_layers:
        raise UserError(
            f"--speculative-algorithm MTP: {names[0]} has no draft layer here (num_nextn_predict_layers or "
            f"mtp_num_hidden_layers in config.json counts them; of DeepSeek-V3, of GLM-4.5 and later, and of "
            f"Qwen3-Next and Qwen3.5 without mtp_use_dedicated_embeddings, they are read). "
            f"{WITHOUT_DRAFT_LAYER}"
        )
    spec = _with_fp8_index(spec) if index_fp8 else spec
    return spec.with_draft_layer() if drafts else spec


def _with_fp8_index(spec: DecoderSpec) -> DecoderSpec:
    """`spec` with index keys in FP8, in all layers that keep some."""
    layers = spec.shape.attention
    if not any(isinstance(layer, SparseLatentSpec) for layer in layers):
        raise UserError(
            f"--index-cache-dtype fp8: {spec.shape.architecture} keeps no index keys of single tokens "
            "(DeepSeek-V3.2 and GLM-5 do). Leave --index-cache-dtype out"
        )
    rounded = (replace(x, index_fp8=True) if isinstance(x, SparseLatentSpec) else x for x in layers)
    return replace(spec, shape=replace(spec.shape, attention=tuple(rounded)))


def _unknown(architecture: str) -> str:
    nearest = get_close_matches(architecture, ARCHITECTURES, n=1)
    similar = f" (the most similar name is {nearest[0]})" if nearest else ""
    return (
        f"unknown model architecture {architecture!r}; known: {', '.join(sorted(ARCHITECTURES))}{similar}. "
        "Give a checkpoint whose config.json names one of these under architectures; docs/extending.md says "
        "how to add another"
    )


def _as_stored(quantization: Quantization, spec: DecoderSpec, names: Collection[str]) -> Quantization:
    """Without a draft layer whose experts have no scales in the files: quantised copies of a model often have
    it as it was, and not every writer lists it as left out."""
    if not spec.drafts:
        return quantization
    layer = spec.shape.num_layers - 1
    for part in (spec.layer_prefix(layer), spec.experts_prefix(layer)):
        stored = [name.rpartition(".")[2] for name in names if name.startswith(f"{part}.")]
        if stored and not any("scale" in name for name in stored):
            return quantization.leaving_out(part)
    return quantization


def _with_formats(spec: DecoderSpec, quantization: Quantization) -> DecoderSpec:
    """With the one format of all MoE layers; layers that differ are refused, since one plan serves them all.
    A draft layer may differ, and has a plan of its own."""
    formats = {i: quantization.experts_format(spec.experts_prefix(i)) for i in spec.moe_layers}
    of_draft = formats.pop(spec.moe_layers[-1]) if spec.drafts else None
    first, *others = formats
    for i in others:
        if formats[i] != formats[first]:
            raise UserError(
                f"the experts of layer {first} are {formats[first][0]} and those of layer {i} are "
                f"{formats[i][0]}; a checkpoint whose MoE layers differ in format is not supported. "
                "Requantise it with all of them, or none, left out"
            )
    differs = of_draft is not None and of_draft != formats[first]
    return replace(
        spec,
        moe=_in_format(spec.moe, formats[first]),
        draft_moe=_in_format(spec.moe, of_draft) if of_draft is not None and differs else None,
    )


def _in_format(moe: MoESpec, experts_format: tuple[Format, bool]) -> MoESpec:
    name, quantized_activations = experts_format
    return replace(moe, format=name, quantized_activations=quantized_activations)


def _skip(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Leave out, and say so, what the family's checkpoints hold for something that is not served."""
    for part in spec.skipped:
        names = [name for name in checkpoint.unread() if name.startswith(part.prefix)]
        if names:
            nbytes = sum(checkpoint.meta(name).nbytes for name in names)
            logger.info(
                "%s: skipped %d tensors (%.1f MB) of the %s, %s*: text alone is served, without it",
                checkpoint.folder,
                len(names),
                nbytes / 1e6,
                part.what,
                part.prefix,
            )
            checkpoint.set_aside(names)


def _refuse_unread(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Tensors without a place (a bias, a shared expert, zero points, more layers) belong to another model."""
    tied_head = f"{spec.names.head}." if spec.tied_embeddings else None
    unread = [
        name
        for name in checkpoint.unread()
        if not HARMLESS_TENSORS.fullmatch(name) and not (tied_head and name.startswith(tied_head))
    ]
    if unread:
        raise UserError(
            f"{checkpoint.folder}: {len(unread)} tensors have no place in {spec.shape.architecture} as "
            f"config.json describes it, such as {', '.join(unread[:3])}; without them the result would be "
            "wrong. Check that config.json belongs to these weights, and that its quantization_config says "
            "how they are stored"
        )


def _silent(what: str, done: int, total: int) -> None:
    """Reports no progress."""
