"""Number formats: one torch-free table of them (spec.py), and codecs in plain torch.

codec.py encodes and packed.py decodes weights; e2m1, fp8, nvfp4 and mxfp4 hold the arithmetic, scales the
resolution of NVFP4's scales, layouts the orders in which kernels want weights and scales.
"""
