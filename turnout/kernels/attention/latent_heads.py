"""The products by head on either side of absorbed latent attention, each in one launch (Triton).

The library's batched products wait for the kernel in front before they load anything, leave out the rotated
part, which is a copy of its own, and what a step keeps is one more. Here programs load weights before they
wait (programmatic dependent launch), and store with the queries what the step keeps.

Legend: N rows (tokens), M of them whose latents are stored; H heads, DN/DR sizes of a query's part that is
absorbed and of its rotated part, D = DN + DR, DV of a value, LC of the latent vector, C = LC + DR, S slots of
the cache; XP the power of two of a size X.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.row_gemm import PROCESSORS
from turnout.kernels.common.sizes import power_of_two

MOST_ROWS, MOST_OF_VALUES = 256, 16  # above which the library's products take less
ROWS = 64  # of a program, at most
HELD = 16 * 1024  # weights of a program, which it loads before it waits


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["slots_ptr"])
def absorb_heads(
    q_ptr, weight_ptr, latent_ptr, slots_ptr, cache_ptr, out_ptr, head_stride, N, M, H,
    DN: tl.constexpr, DNP: tl.constexpr, DR: tl.constexpr, DRP: tl.constexpr, LC: tl.constexpr,
    CP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N, H, C]: of each head of q [N, H, D] the first DN values @ weight [H, DN, LC], then the others;
    and cache[slots[i]] = latent[i] of the first M rows, latent [M, C]. Weights of a head lie head_stride from
    those of the one before.

    A program has ROWS rows, COLUMNS of LC and a head. Those of the first columns share out what is copied.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.program_id(2)
    d = tl.arange(0, DNP)
    weight_at = weight_ptr + h.to(tl.int64) * head_stride + d[:, None] * LC + c[None, :]
    weight = tl.load(weight_at, mask=(d < DN)[:, None] & (c < LC)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    rows = n.to(tl.int64) * H + h
    held = n < N
    q_at = q_ptr + rows[:, None] * (DN + DR)
    q = tl.load(q_at + d[None, :], mask=held[:, None] & (d < DN)[None, :], other=0.0)
    acc = tl.dot(q, weight, input_precision="ieee")
    out_at = out_ptr + rows[:, None] * (LC + DR)
    kind = out_ptr.dtype.element_ty
    tl.store(out_at + c[None, :], acc.to(kind), mask=held[:, None] & (c < LC)[None, :])
    if tl.program_id(1) == 0:
        r = tl.arange(0, DRP)
        turned = held[:, None] & (r < DR)[None, :]
        tl.store(out_at + LC + r[None, :], tl.load(q_at + DN + r[None, :], mask=turned), mask=turned)
        k = tl.arange(0, CP)
        for i in range(h, ROWS, H):
            row = tl.program_id(0) * ROWS + i
            kept = (k < LC + DR) & (row < M)
            values = tl.load(latent_ptr + row.to(tl.int64) * (LC + DR) + k, mask=kept)
            slot = tl.load(slots_ptr + row, mask=row < M, other=0).to(tl.int64)
            tl.store(cache_ptr + slot * (LC + DR) + k, values, mask=kept)


@triton.jit(do_not_specialize=["N"])
def values_of_heads(
    mixed_ptr, weight_ptr, out_ptr, head_stride, N, H,
    DV: tl.constexpr, LC: tl.constexpr, LCP: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, H, DV] = mixed [N, H, LC] @ weight [H, DV, LC].T of each head; up to ROWS rows.

    A program has all rows, VALUES of DV and a head.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.arange(0, ROWS)
    v = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    h = tl.program_id(1)
    k = tl.arange(0, LCP)
    known = (k < LC)[None, :]
    weight_at = weight_ptr + h.to(tl.int64) * head_stride + v[:, None] * LC
    weight = tl.load(weight_at + k[None, :], mask=(v < DV)[:, None] & known, other=0.0)
    if PDL:
        gdc_wait()
    held = (n < N)[:, None]
    rows = (n * H + h)[:, None]
    mixed = tl.load(mixed_ptr + rows * LC + k[None, :], mask=held & known, other=0.0)
    acc = tl.dot(mixed, tl.trans(weight), input_precision="ieee")
    tl.store(
        out_ptr + rows * DV + v[None, :], acc.to(out_ptr.dtype.element_ty), mask=held & (v < DV)[None, :]
    )


def _share(size: int, most: int, programs: int) -> int:
    """How much of `size` a program takes: the largest power of two, up to `most`, of which there are programs
    for all multiprocessors, or 32. programs: with all of it."""
    share = max(16, min(power_of_two(size), most))
    while share > 32 and programs * triton.cdiv(size, share) < PROCESSORS:
        share //= 2
    return share


def takes(x_NHX: Tensor, most: int) -> bool:
    """Whether there are up to `most` rows, of 16 bits: in float32 the library takes less on a GPU."""
    return len(x_NHX) <= most and (x_NHX.element_size() == 2 or not x_NHX.is_cuda)


def absorbed(q_NHD: Tensor, weight_HDL: Tensor, kept: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """Queries [N, H, C] of latent attention; see `absorb_heads`.

    q: contiguous; weight [H, DN, LC], whose rows are. kept: (latent [M, C], slots int64 [M], cache [S, C]),
    contiguous, M up to N: what to store with them.
    """
    (N, H, D), (_, DN, LC) = q_NHD.shape, weight_HDL.shape
    out_NHC = q_NHD.new_empty(N, H, LC + D - DN)
    if N:
        # Without anything to store these are not read.
        latent, slots, cache = kept or (q_NHD, torch.empty(0, dtype=torch.int64, device=q_NHD.device), q_NHD)
        rows, early = max(16, power_of_two(min(N, ROWS))), launches_early(q_NHD.device)
        depth = max(16, power_of_two(DN))
        blocks = triton.cdiv(N, rows)
        columns = _share(LC, HELD // depth, blocks * H)
        absorb_heads[(blocks, triton.cdiv(LC, columns), H)](
            q_NHD, weight_HDL, latent, slots, cache, out_NHC, weight_HDL.stride(0), N,
            len(slots), H, DN, depth, D - DN, power_of_two(D - DN), LC, power_of_two(LC + D - DN), rows,
            columns, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NHC


def values(mixed_NHL: Tensor, weight_HVL: Tensor) -> Tensor:
    """[N, H, DV] of up to MOST_OF_VALUES rows; see `values_of_heads`.

    mixed: contiguous; weight [H, DV, LC], whose rows are.
    """
    (N, H, LC), DV = mixed_NHL.shape, weight_HVL.shape[1]
    assert N <= MOST_OF_VALUES, "see `takes`"
    out_NHV = mixed_NHL.new_empty(N, H, DV)
    if N:
        width, early = max(16, power_of_two(LC)), launches_early(mixed_NHL.device)
        share = _share(DV, HELD // width, H)
        values_of_heads[(triton.cdiv(DV, share), H)](
            mixed_NHL, weight_HVL, out_NHV, weight_HVL.stride(0), N, H,
            DV, LC, width, MOST_OF_VALUES, share, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NHV
