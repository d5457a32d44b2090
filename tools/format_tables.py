"""docs/formats.md: the number formats of expert weights, who publishes them, and what is made of each."""

from __future__ import annotations

from tools.backend_tables import runners
from tools.tables import NOTICE, code, table
from turnout.formats.spec import FORMATS

# Whose checkpoints hold experts in a format, as turnout/checkpoint reads them.
WRITERS = {
    "bf16": "any unquantised checkpoint, experts one by one or stacked; decoded while they load: INT4 with "
    "zero points, FP8 with a scale per row of compressed-tensors (`float-quantized`, FP8_DYNAMIC) and "
    "ModelOpt (`FP8_PER_CHANNEL_PER_TOKEN`)",
    "fp8": "128 x 128 blocks: DeepSeek-V3's layout (`quant_method: fp8`), DeepSeek-V4's, compressed-tensors "
    "(`float-quantized`, FP8_BLOCK), ModelOpt (`FP8_PB_WO`); one scale per weight: ModelOpt (`FP8`), "
    "compressed-tensors (`float-quantized`), AutoFP8, Quark",
    "nvfp4": "ModelOpt (`NVFP4`, `W4A16_NVFP4`, `W4A8_NVFP4_FP8`), compressed-tensors "
    "(`nvfp4-pack-quantized`)",
    "mxfp4": "GPT-OSS's layout (`quant_method: mxfp4`), DeepSeek-V4's experts (`expert_dtype: fp4`), "
    "compressed-tensors (`mxfp4-pack-quantized`), "
    "ModelOpt (`MXFP4`, `W4A8_MXFP4_FP8`), Quark (`fp4` with `e8m0` scales of 32)",
    "int4": "compressed-tensors (`pack-quantized`, W4A16, symmetric), as Kimi-K2-Thinking has it",
}
# What exporting tools and engines make of NVFP4 input scales that differ between experts.
INPUT_SCALES = (
    ("ModelOpt", "calibration gives all experts the largest; so does its export from Megatron"),
    ("llm-compressor", "each expert keeps its own"),
    (
        "vLLM",
        "FlashInfer's kernels (TRT-LLM, CUTLASS, CuTe DSL) and the emulation: the largest of all experts, "
        "for both GEMMs; its own CUTLASS kernel: each expert's own",
    ),
    (
        "SGLang",
        "FlashInfer's TRT-LLM and CUTLASS: the largest, for both GEMMs; CuTe DSL: the largest for the first, "
        "each expert's own for the second; its own CUTLASS kernel: each expert's own",
    ),
)


def formats() -> str:
    rows = [
        (
            f"`{info.format}`",
            info.values,
            info.shares_scale,
            info.scale,
            f"{info.bits_per_weight:.4g}",
            f"{info.k_multiple}",
            info.needs,
        )
        for info in FORMATS.values()
    ]
    head = ("format", "values", "values per scale", "scale", "bits per weight", "columns, multiple of")
    return "\n\n".join(
        [
            "# Number formats of expert weights",
            NOTICE,
            "Every format is read from its publishers' checkpoints as they are, and written by "
            "`turnout quantize MODEL OUT --format NAME`. Weights are kept packed and decoded at each use, or "
            "decoded once at load, whichever the plan finds right (`--moe-weight-storage`).",
            table((*head, "to multiply in it, hardware needs"), rows),
            "A value is its code times its scale, and for NVFP4 times a float32 scale of the whole matrix. "
            "Of INT4 that product is rounded to bfloat16, which is what compressed-tensors decompresses to.",
            "## Checkpoints that are read",
            table(
                ("format", "published by or as", "runners"),
                [
                    (f"`{f}`", WRITERS[f], code(r.name for r in runners() if f in r.weight_formats))
                    for f in FORMATS
                ],
            ),
            "Dense layers are decoded to the compute dtype while they load, from every one of these formats, "
            "but for FP8 on CUDA GPUs of compute capability 9.0 or later: there projections of attention and "
            "of Gated DeltaNet, dense MLPs and shared experts stay FP8 in memory, and are decoded where they "
            "are multiplied. "
            "Decoded at load are also experts in FP8 with a scale per row, in INT4 with zero points, with "
            "columns that GPTQ reordered (`weight_g_idx`), or with float16 or float32 scales, as no runner "
            "multiplies in those: they then take the memory of unquantised ones, which `turnout plan` counts "
            "and the log says. Other INT4 stays packed: a scale for 64 or 128 columns or for a row is "
            "repeated for every 32. Activations are quantised only in formats that the table above has a "
            "scheme for, whatever else their writers meant: the result is the more exact. Attention, dense "
            "MLPs, shared experts and the head may each be in a format of their own, as ModelOpt's "
            "`MIXED_PRECISION`, several `config_groups` of compressed-tensors and Quark's "
            "`layer_quant_config` say. A checkpoint whose MoE layers differ in format is refused.",
            *_input_scales(),
        ]
    )


def _input_scales() -> list[str]:
    """The paragraphs on W4A4."""
    return [
        "An NVFP4 checkpoint with calibrated input scales was made for W4A4: activations in NVFP4 too. "
        "Where a device has no FP4 tensor cores, only the weights stay quantised (W4A16); "
        "`--moe-activation-dtype nvfp4` emulates W4A4 there, to measure its accuracy.",
        "## Input scales of W4A4",
        "Checkpoints carry an input scale for every expert and projection. The input of each of a "
        "layer's two GEMMs is quantised with one of them: the largest of all experts of the layer, in "
        "every layout of batches and on every rank, whichever experts it holds. Who else does what:",
        table(("", "input scales of the experts of one layer"), INPUT_SCALES),
        "The largest is what most of them do, and the only choice with which a token can be quantised "
        "once, before it is dispatched, and results do not depend on how experts are spread over ranks. "
        "It costs no accuracy: the scale of a group of 16 values is an e4m3 number of its own, whose "
        "normal range spans 2^14.8, so a global scale several times too large leaves it there, while an "
        "expert's own clips what its calibration did not see. Against activations that are not rounded, "
        "logits of a small model are off by 5.8 % with either; from each other, being other roundings, "
        "they differ by 3.8 % (`tests/models/test_formats.py`). A comparison with an engine that takes "
        "each expert's own shows that difference.\n",
    ]
