"""The words of plans, batches and weights: every value that can only be one of a few, written once.

Each member is a `str` with the value that flags, plans in JSON and documentation show, so `Phase.DECODE ==
"decode"` and `json.dumps` writes the word. Code compares members, never spelled-out words: mypy then knows
that there is no `Phase.DECODES`. Kernels take plain strings (`str(member)`), since compilers put the
representation of their arguments into what they compile. Imports no torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Device = Literal["cpu", "cuda"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]  # torch dtypes of hidden states, by name


class Word(StrEnum):
    """A member that is printed as its plain word everywhere: also by repr, in errors, logs and plans."""

    def __repr__(self) -> str:
        return repr(self.value)


class Phase(Word):
    """What a step does: prefill if any sequence of any rank brings prompt tokens, else decode."""

    PREFILL = "prefill"
    DECODE = "decode"


class Layout(Word):
    """How tokens are laid out for the experts' GEMMs (moe/batch.py)."""

    TOKENS = "tokens"  # [T, H] with top-k ids and weights; the runner sums over k
    BATCHED_EXPERTS = "batched_experts"  # [E_loc, C, H], the tokens of each local expert; the dispatcher sums


class Format(Word):
    """How numbers are stored: expert weights, activations of a GEMM, hidden states between ranks.

    Bits, groups and scales of each are in formats/spec.py. Of weights, BF16 means "not quantised": float16
    or float32 too; of hidden states, the compute dtype.
    """

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    INT4 = "int4"


class WeightStorage(Word):
    """How a runner keeps expert weights."""

    PACKED = "packed"  # as in the checkpoint, decoded at each use
    DECODED = "decoded"  # in the compute dtype, once at load


class Bf16Units(Word):
    """What a CPU multiplies bfloat16 with, adding up in float32."""

    AMX = "amx_bf16"  # tiles of 16 x 32 by 32 x 16
    AVX512 = "avx512_bf16"  # dot products of pairs, 16 at a time
    NONE = "none"  # widened to float32, which the ordinary vector units multiply


class Exchange(Word):
    """Which tokens a dispatcher brings to a rank."""

    GATHER = "gather"  # those of all data-parallel groups
    ALL_TO_ALL = "all_to_all"  # those that chose an expert of which the rank holds a part


class Reduce(Word):
    """What the layer has left to sum after combine."""

    NONE = "none"  # combine made the sum over ranks
    LAYER = "layer"  # ranks hold partial sums: the layer all-reduces them


class SharedExpert(Word):
    """Which part of a shared expert's weights a rank holds."""

    SHARDED = "sharded"  # a shard: its output is part of the sum over ranks
    WHOLE = "whole"  # all: it computes the tokens of its rank


class ActivationKind(Word):
    """What stands between an expert's two GEMMs (moe/spec.py has the formulas)."""

    SILU = "silu"
    SWIGLU = "swiglu"
    RELU2 = "relu2"


class RoutingKind(Word):
    """How router logits become expert ids and weights (moe/spec.py has the formulas)."""

    SOFTMAX_TOPK = "softmax_topk"
    SIGMOID_TOPK = "sigmoid_topk"
    TOPK_SOFTMAX = "topk_softmax"
    SQRT_SOFTPLUS_TOPK = "sqrt_softplus_topk"


class QKNorm(Word):
    """How queries and keys are normed before they are rotated."""

    NONE = "none"
    HEAD = "head"  # each head by itself, all with one weight [D] for queries and one for keys
    WHOLE = "whole"  # all query heads of a token together, and all key heads, with weights [Hq D], [Hkv D]
    UNIT = "unit"  # each head by itself, without a weight


class DeltaRows(Word):
    """How checkpoints store the projections of Gated DeltaNet (models/delta_net.py)."""

    BY_KIND = "by_kind"  # one matrix each: all queries, keys and values; z; b; a
    BY_KEY_HEAD = "by_key_head"  # for each key head its query, key, values and z; in another its b and a


class AttentionKind(Word):
    """Which earlier tokens a layer attends to (attention/kinds.py)."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"
    LATENT = "latent"
    SPARSE_LATENT = "sparse_latent"
    COMPRESSED = "compressed"
