"""Which of the kernels that FlashInfer generates are compiled."""

from pathlib import Path

from tools.build_flashinfer_hopper import _kernels

W4A16 = """template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_bfloat16, SafeFP4, __nv_bfloat16,
Shape<Int<{m}>, Int<{n}>, Int<{k}>>, Shape<Int<{c}>, Int<1>, Int<1>>, KernelTmaWarpSpecialized{schedule}> (
GroupedGemmInput<__nv_bfloat16, SafeFP4>inputs, size_t* workspace_size);
"""
BF16 = """INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16,
        void, EpilogueOpDefault, {fusion},
        {m}, {n}, 64, {c}, 1, 1,
        false, false, false, {swap});
"""


def test_kernels_that_turnout_calls_are_grouped_by_tile(tmp_path: Path):
    folder = tmp_path / "gemm_grouped" / "90"
    folder.mkdir(parents=True)
    mixed = [
        W4A16.format(m=64, n=16, k=128, c=1, schedule="Pingpong"),
        W4A16.format(m=64, n=16, k=128, c=2, schedule="Pingpong"),  # a cluster
        W4A16.format(m=128, n=64, k=256, c=1, schedule="Cooperative"),
        W4A16.format(m=128, n=64, k=256, c=1, schedule="Pingpong"),  # which no tactic asks for
        W4A16.format(m=64, n=64, k=512, c=1, schedule="Pingpong"),  # no tile of ours
        W4A16.replace("__nv_bfloat16, SafeFP4,", "__nv_fp8_e4m3, SafeFP4,").format(
            m=64, n=16, k=128, c=1, schedule="Pingpong"
        ),
    ]
    dense = [
        BF16.format(fusion="NONE", m=128, n=16, c=1, swap="true"),
        BF16.format(fusion="NONE", m=128, n=16, c=1, swap="false"),
        BF16.format(fusion="NONE", m=128, n=16, c=2, swap="false"),
        BF16.format(fusion="FINALIZE", m=128, n=16, c=1, swap="false"),
        BF16.replace("Sm90, __nv_bfloat16, __nv", "Sm90, half, __nv").format(
            fusion="NONE", m=128, n=16, c=1, swap="true"
        ),
    ]
    (folder / "mixed.cu").write_text('#include "mixed.inl"\n' + "".join(mixed))
    (folder / "dense.cu").write_text('#include "dense.inl"\n' + "".join(dense))
    few, every = list(_kernels(tmp_path, False)), list(_kernels(tmp_path, True))
    assert [(name, head, len(kernels)) for name, head, kernels in few] == [
        ("w4a16_64x16x128", '#include "mixed.inl"', 1),
        ("w4a16_128x64x256", '#include "mixed.inl"', 1),
        ("bf16_128x16x64", '#include "dense.inl"', 2),
    ]
    chosen = {kernel + "\n" for *_, kernels in few for kernel in kernels}
    assert chosen == {mixed[0], mixed[2], dense[0], dense[1]}
    assert sum(len(kernels) for *_, kernels in every) == 6
