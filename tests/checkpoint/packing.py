"""Quantise a weight in each published format with numpy, ml_dtypes and compressed-tensors only.

Nothing here uses Turnout, so that agreement with its readers means something. Every function takes float32
[N, K] and returns the tensors that the format stores for one linear layer, by suffix, and the float32
weights that they stand for.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """uint8 codes 0..15, rounded and saturated by ml_dtypes."""
    return np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def two_per_byte(codes: np.ndarray) -> np.ndarray:
    """[..., K] codes to [..., K/2] bytes, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def nvfp4(weight: Tensor, amax: float) -> Packed:
    """ModelOpt's tensors; `amax` sets `weight_scale_2` = amax / (6 * 448)."""
    w = weight.numpy()
    scale_2 = np.float32(amax / (6 * 448))
    groups = w.reshape(w.shape[0], -1, 16)
    scale = (np.abs(groups).max(-1) / 6 / scale_2).astype(ml_dtypes.float8_e4m3fn)
    full = scale.astype(np.float32) * scale_2
    codes = e2m1_codes(
        np.divide(groups, full[..., None], where=full[..., None] > 0, out=np.zeros_like(groups))
    )
    tensors = {
        ".weight": torch.from_numpy(two_per_byte(codes.reshape(w.shape))),
        ".weight_scale": torch.from_numpy(scale.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor(scale_2),
    }
    return tensors, torch.from_numpy((e2m1_values(codes) * full[..., None]).reshape(w.shape))


def compressed_nvfp4(weight: Tensor, amax: float) -> Packed:
    """compressed-tensors' own calibration and compressor; `amax` sets the global scale."""
    scheme = nvfp4_scheme(quantized_activations=True)
    global_scale = generate_gparam(torch.tensor(-amax), torch.tensor(amax))
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
    full = (packed["weight_scale"].float() / global_scale).repeat_interleave(16, dim=-1)
    return {f".{name}": tensor for name, tensor in packed.items()}, codes * full


def nvfp4_scheme(*, quantized_activations: bool) -> QuantizationScheme:
    return preset_name_to_scheme("NVFP4" if quantized_activations else "NVFP4A16", ["Linear"])


def compressed(weight: Tensor, scheme: QuantizationScheme) -> Packed:
    """compressed-tensors' own scales, compressor and decompression of any scheme without a global scale."""
    args = scheme.weights
    if args.strategy == "channel":
        groups = weight.unsqueeze(1)
    elif args.strategy == "block":
        n, k = weight.shape
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        groups = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    else:
        groups = weight.unflatten(-1, (-1, args.group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = {
        "float": FloatQuantizationCompressor if args.num_bits == 8 else MXFP4PackedCompressor,
        "int": PackedQuantizationCompressor,
    }[args.type]
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    packed = compressor.compress(state, scheme)
    plain = compressor.decompress(packed, scheme)["weight"].float()
    return {f".{name}": tensor for name, tensor in packed.items()}, plain


def int4_scheme(*, group: int | None, symmetric: bool) -> QuantizationScheme:
    """W4A16 with scales of `group` columns, or of a whole row."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=args)


def fp8_channel(weight: Tensor) -> Packed:
    """ModelOpt's FP8_PER_CHANNEL_PER_TOKEN: e4m3 and a scale [N]."""
    w = weight.numpy()
    scale = np.abs(w).max(1) / np.float32(448)
    data = (w / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
    tensors = {
        ".weight": torch.from_numpy(data.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_scale": torch.from_numpy(scale),
    }
    return tensors, torch.from_numpy(data.astype(np.float32) * scale[:, None])


def fp8_pb_wo(weight: Tensor) -> Packed:
    """ModelOpt's FP8_PB_WO: DeepSeek-V3's blocks by another name, scales [N/128, 1, K/128, 1]."""
    tensors, plain = fp8(weight)
    return {
        ".weight": tensors[".weight"],
        ".weight_scale": tensors[".weight_scale_inv"][:, None, :, None],
    }, plain


def modelopt_mxfp4(weight: Tensor) -> Packed:
    tensors, plain = mxfp4(weight)
    return {".weight": tensors["_blocks"].flatten(1), ".weight_scale": tensors["_scales"]}, plain


def w4a8_nvfp4_fp8(weight: Tensor, amax: float) -> Packed:
    """NVFP4 whose global scale is amax / 448, so that block scales lie below 448 / 6 (ModelOpt)."""
    tensors, plain = nvfp4(weight, 6 * amax)
    return tensors | {".input_scale": torch.tensor(0.25)}, plain


def mxfp4(weight: Tensor) -> Packed:
    """GPT-OSS blocks [N, K/32, 16] and e8m0 scales [N, K/32] of one expert's matrix."""
    w = weight.numpy()
    groups = w.reshape(w.shape[0], -1, 32)
    _, exponent = np.frexp(np.abs(groups).max(-1))
    exponent = np.where(np.abs(groups).max(-1) == 0, -127, exponent - 3)
    codes = e2m1_codes(np.ldexp(groups, -exponent[..., None]))
    tensors = {
        "_blocks": torch.from_numpy(two_per_byte(codes)),
        "_scales": torch.from_numpy((exponent + 127).astype(np.uint8)),
    }
    values = np.ldexp(e2m1_values(codes), exponent[..., None]).astype(np.float32)
    return tensors, torch.from_numpy(values.reshape(w.shape))


def fp8(weight: Tensor, block: int = 128, *, powers: bool = False) -> Packed:
    """DeepSeek-V3's e4m3 blocks; edge blocks are smaller. powers: with scales that are powers of two."""
    w = weight.numpy()
    n, k = w.shape
    scale = np.zeros((-(-n // block), -(-k // block)), np.float32)
    data, plain = np.zeros(w.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(w)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale[i, j] = np.abs(w[here]).max() / 448
            if powers:
                scale[i, j] = 2 ** np.ceil(np.log2(scale[i, j]))
            data[here] = (w[here] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
            plain[here] = data[here].astype(np.float32) * scale[i, j]
    tensors = {
        ".weight": torch.from_numpy(data.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.from_numpy(scale),
    }
    return tensors, torch.from_numpy(plain)


def fp8_tensor(weight: Tensor) -> Packed:
    """e4m3 with one scale."""
    w = weight.numpy()
    scale = np.float32(np.abs(w).max() / 448)
    data = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    tensors = {
        ".weight": torch.from_numpy(data.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_scale": torch.tensor(scale),
    }
    return tensors, torch.from_numpy(data.astype(np.float32) * scale)
