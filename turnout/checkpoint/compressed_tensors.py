"""NVFP4 as compressed-tensors (llm-compressor) packs it: format `nvfp4-pack-quantized`.

Per linear layer `weight_packed` uint8 [N, K/2] and `weight_scale` e4m3 [N, K/16] as ModelOpt has them, but
`weight_global_scale` and `input_global_scale` [1] are the RECIPROCALS of ModelOpt's: a block scale is
divided by them.

Source: compressed-tensors, `compressors/nvfp4` and `quantization/lifecycle/forward.py`.
"""

from turnout.checkpoint.nvfp4 import Spelling

SPELLING = Spelling(
    data=".weight_packed",
    scale=".weight_scale",
    global_scale=".weight_global_scale",
    input_scale=".input_global_scale",
    reciprocal=True,
)
