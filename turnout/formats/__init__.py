"""Number formats: one torch-free table of them (spec.py), and codecs in plain torch.

codec.py encodes and packed.py decodes weights; e2m1, fp8, nvfp4, mxfp4 and int4 hold the arithmetic, scales
the resolution of NVFP4's scales, layouts the orders in which kernels want weights and scales.
"""

from typing import TYPE_CHECKING

from turnout.lazy import lazy

if TYPE_CHECKING:
    from turnout.formats.codec import FormatError as FormatError
    from turnout.formats.codec import encode as encode
    from turnout.formats.packed import PackedTensor as PackedTensor

# What library users import from here; on first use, since the table needs no torch.
__getattr__ = lazy(__name__, {"FormatError": "codec", "encode": "codec", "PackedTensor": "packed"})
