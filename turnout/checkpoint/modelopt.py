"""NVFP4 as NVIDIA ModelOpt exports it.

Per linear layer `weight` uint8 [N, K/2], `weight_scale` e4m3 [N, K/16] (row-major, not swizzled), and two
scalars that multiply: `weight_scale_2` and, where activations are quantised, `input_scale`, amax / (6 * 448).
Stacked experts spell these `gate_up_proj`, `gate_up_proj_weight_scale`, ... with scalars [E] or [E, 2].

W4A8_NVFP4_FP8 is stored alike, though its two levels of scales divide the range otherwise: `weight_scale_2`
is amax / 448. Its `input_scale`, of FP8, is left unused.

Source: ModelOpt, unified Hugging Face export.
"""

from turnout.checkpoint.nvfp4 import Spelling

SPELLING = Spelling(
    data=".weight",
    scale=".weight_scale",
    global_scale=".weight_scale_2",
    input_scale=".input_scale",
    reciprocal=False,
)
