"""Flags that contradict the checkpoint or the hardware."""

from __future__ import annotations

from turnout.attention.capability import AUTO
from turnout.attention.choose import backends
from turnout.attention.kinds import LATENT_KINDS
from turnout.config import Config
from turnout.errors import Refusal, standing
from turnout.models.interface import ModelDescription
from turnout.packages import TRITON
from turnout.parallel.hardware import Hardware
from turnout.vocabulary import ComputeDtype

QUANTIZATION_FORMATS = {"modelopt_fp4": "nvfp4"}  # flag -> format, where the names differ


def contradictions(
    config: Config, description: ModelDescription, hardware: Hardware, dtype: ComputeDtype
) -> list[Refusal]:
    """Flags that say something else than the checkpoint or the hardware."""
    held, longest = description.moe.format, description.shape.max_position_embeddings
    wanted = QUANTIZATION_FORMATS.get(config.quantization, config.quantization)
    same = {form: name for name, form in QUANTIZATION_FORMATS.items()}.get(held, held)
    units = hardware.known_bf16_units
    processor = hardware.processor if hardware.device == "cpu" else f"{hardware.name}, which is no CPU,"
    lacks_units = (
        config.cpu_bf16_units not in ("auto", *units),
        f"--cpu-bf16-units {config.cpu_bf16_units}",
        f"{processor} has none of these, or the operating system does not let processes use them",
        f"use --cpu-bf16-units auto or {' or '.join(units)}",
    )
    another_cache = (
        config.kv_cache_dtype not in ("auto", dtype),
        f"--kv-cache-dtype {config.kv_cache_dtype}",
        f"what is kept of tokens is in the compute type, {dtype}; no other is implemented",
        "use --kv-cache-dtype auto; --context-length and --max-running-requests bound its memory",
    )
    another_format = (
        wanted not in ("auto", held),
        f"--quantization {config.quantization}",
        f"the experts in {config.model} are {held}",
        f"use --quantization auto or {same}, or convert the bf16 checkpoint with "
        f"`turnout quantize MODEL OUT --format {wanted}`",
    )
    too_long = (
        config.context_length > longest,
        f"--context-length {config.context_length}",
        f"positions beyond {longest} (max_position_embeddings) were never trained",
        f"use --context-length {longest} or less, or 0 for the model's",
    )
    another_device = (
        config.device not in ("auto", hardware.device),
        f"--device {config.device}",
        f"the plan is for {hardware.name}, a {hardware.device} device",
        f"use --device auto or {hardware.device}, or another --hardware",
    )
    return [
        *standing("hardware", [lacks_units]),
        *standing("KV cache", [another_cache]),
        *standing("checkpoint", [another_format]),
        *standing("model", [too_long]),
        *_not_deterministic(config, description, hardware),
        *standing("hardware", [another_device]),
    ]


def _not_deterministic(config: Config, description: ModelDescription, hardware: Hardware) -> list[Refusal]:
    """Why --deterministic is impossible on CUDA; nothing where it is not asked for."""
    if not config.deterministic or hardware.device != "cuda":
        return []
    latent = LATENT_KINDS & {layer.kind for layer in description.shape.attention}
    lacking = TRITON.lacking() if hardware.present else ""
    able = [AUTO, *(backend.name for backend in backends() if backend.device_tables)]
    asked, without = "--deterministic", "leave --deterministic out"
    obstacles = (
        (
            bool(latent),
            asked,
            "latent attention on CUDA has products by head that are not batch-invariant",
            f"{without}, or use --device cpu",
        ),
        (
            bool(lacking),
            asked,
            f"attention and dense layers: {lacking}",
            f"{TRITON.install}, or {without}",
        ),
        (
            config.attention_backend not in able,
            asked,
            f"--attention-backend {config.attention_backend} is not batch-invariant",
            f"use --attention-backend {' or '.join(able)}, or {without}",
        ),
    )
    return standing("model", obstacles)
