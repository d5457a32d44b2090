"""Number formats: one torch-free table of them (spec.py), and codecs in plain torch.

codec.py encodes and packed.py decodes weights; e2m1, fp8, nvfp4, mxfp4 and int4 hold the arithmetic, scales
the resolution of NVFP4's scales, layouts the orders in which kernels want weights and scales.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnout.formats.codec import FormatError as FormatError
    from turnout.formats.codec import encode as encode
    from turnout.formats.packed import PackedTensor as PackedTensor

# What library users import from here; on first use, since the table needs no torch.
_LAZY = {"FormatError": "codec", "encode": "codec", "PackedTensor": "packed"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"turnout.formats.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'turnout.formats' has no attribute {name!r}")
