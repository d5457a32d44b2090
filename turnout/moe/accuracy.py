"""How far a runner may be from the float32 reference: ||y - ref|| / ||ref|| over a whole batch.

| GEMMs multiply with | compute dtype | what makes the difference |
|---|---|---|
| plain numbers | float32 | only the order of summation |
| plain numbers | bfloat16, float16 | weights, inputs and outputs are rounded to 8 or 11 bits |
| NVFP4 activations | float32 | a last bit may carry an activation over a rounding boundary |
| NVFP4 activations | bfloat16, float16 | the same, for every value that rounding carries over one |
| FP8 activations | any | the same, with finer boundaries |

The weight format does not enter: the reference multiplies with the decoded weights as well.
"""

from __future__ import annotations

from torch import Tensor

BOUNDS = {  # by what the GEMMs multiply with, and the compute dtype
    ("bf16", "float32"): 1e-5,
    ("bf16", "bfloat16"): 1e-2,
    ("bf16", "float16"): 1e-2,
    ("nvfp4", "float32"): 1e-2,
    ("nvfp4", "bfloat16"): 1e-1,
    ("nvfp4", "float16"): 1e-1,
    ("fp8", "float32"): 1e-2,
    ("fp8", "bfloat16"): 5e-2,
    ("fp8", "float16"): 5e-2,
}
# One token's error averages over fewer values than a batch's. What a wrong weight does lies far above:
# an unrelated expert in a token's only place has a relative error of about 1.4.
ONE_TOKEN = 5


def relative_error(y: Tensor, ref: Tensor) -> float:
    """0 for two empty or two zero tensors; NaN or Inf anywhere makes it NaN or Inf, which no bound admits."""
    difference, norm = (y.double() - ref.double()).norm().item(), ref.double().norm().item()
    return difference / norm if norm else difference
