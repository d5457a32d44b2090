"""Compile the part of FlashInfer's Hopper MoE module that Turnout calls, with nvcc and without a download.

    python tools/build_flashinfer_hopper.py FOLDER [--deadline SECONDS] [--jobs N] [--every-tile]

FlashInfer compiles `fused_moe_90` at first use, 248 units of up to three minutes each, for every type it has.
Turnout calls it with MXFP4 weights (W4A16), with bf16 and with FP8 blocks. This compiles those: the dispatch
of each type, and the CUTLASS kernels for tiles that batches of 1 to 8192 tokens choose from, without clusters
and without the fused sum. FOLDER receives `fused_moe_90.so` and `trtllm_utils.so`; without the latter the
autotuner fails at every tactic, and says no more than that it skipped some. They belong in
`flashinfer/data/aot/NAME/NAME.so`; with FLASHINFER_DISABLE_JIT=1 the library then loads them by name.

What is left out is still called by name, by code that tries every kernel and goes on with those that work. So
each missing function is defined to throw the library's own exception, and FlashInfer's autotuner drops such
tactics. The kernels for SM80 that a bf16 layer may fall back to are left out in the same way, by a
specialisation of their launcher.

Measured with nvcc 13.0 and FlashInfer 0.7.2: 37 units, with 24 kernels of W4A16 and 12 of bf16, took 115 s on
64 hardware threads that had nothing else to do. A unit takes one of them for most of that and up to 5 GB, the
most for headers: units of two kernels cost hardly more than units of one. The module, 8 MB, passes
tests/moe/backends/flashinfer/test_cutlass_gpu.py on an H200.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MOE = "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"
NAMESPACE = "namespace tensorrt_llm::kernels::cutlass_kernels {\n"
RUNNERS = (
    "__nv_bfloat16, Fp4Type",
    "__nv_bfloat16, __nv_bfloat16",
    "__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16",
)
# Of `trtllm_utils`, a module of its own: the kernel that lets a stream wait, and what it needs of the others.
DELAY = "nv_internal/tensorrt_llm/kernels/delayStream.cu"
SHARED = ("envUtils", "logger", "stringUtils", "tllmException")
SOURCES = (
    "fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu",
    "fused_moe/cutlass_backend/deepgemm_jit_setup.cu",
    f"{MOE}/moe_gemm_kernels_bf16_fp4.cu",
    f"{MOE}/moe_gemm_kernels_bf16_fp8.cu",
    f"{MOE}/moe_gemm_mixed_utils.cu",
    f"{MOE}/moe_gemm_tma_warp_specialized_input.cu",
    "nv_internal/tensorrt_llm/kernels/cutlass_kernels/fp8_blockscale_gemm/fp8_blockscale_gemm.cu",
    "nv_internal/tensorrt_llm/kernels/preQuantScaleKernel.cu",
    "nv_internal/tensorrt_llm/kernels/cutlass_kernels/cutlass_heuristic.cpp",
    "nv_internal/tensorrt_llm/kernels/lora/lora.cpp",
    "nv_internal/cpp/common/memoryUtils.cu",
    *(f"nv_internal/cpp/common/{name}.cpp" for name in SHARED),
)
# Tiles of weights, tokens and depth, from which W4A16 chooses without --every-tile.
TILES = {
    (64, 16, 128), (64, 16, 256), (64, 32, 128), (64, 32, 256), (128, 16, 128), (128, 16, 256),
    (128, 32, 256), (128, 64, 128), (128, 64, 256), (128, 128, 128), (128, 256, 128), (256, 128, 128),
}  # fmt: skip
NO_SM80 = """
namespace tensorrt_llm::kernels::cutlass_kernels_oss {
template <typename Output, typename Arch, cutlass::WeightOnlyQuantOp Op, typename Epilogue, typename Block,
          typename Warp, int Stages>
struct genericMoeGemmKernelLauncher<__nv_bfloat16, __nv_bfloat16, Output, Arch, Op, Epilogue, Block, Warp,
                                    Stages> {
  static void call(GroupedGemmInput<__nv_bfloat16, __nv_bfloat16, Output, Output>, int) {
    TLLM_THROW("kernels for SM80 are not part of this build");
  }
};
}
namespace tensorrt_llm::kernels::cutlass_kernels {
template class MoeGemmRunner<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>;
}
"""
MISSING = """#include "tensorrt_llm/common/assert.h"
#include "tensorrt_llm/common/logger.h"
extern "C" void not_built() { TLLM_THROW("this kernel is not part of the build"); }
"""


@dataclass(frozen=True)
class Unit:
    name: str
    source: Path

    def command(self, flags: dict[str, list[str]], target: Path) -> list[str]:
        kind = "cuda" if self.source.suffix == ".cu" else "c++"
        return [*flags[kind], "-c", str(self.source), "-o", str(target)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--deadline", type=float, default=3600, help="seconds after which to link what there is"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="units to compile at a time")
    parser.add_argument("--every-tile", action="store_true", help="all tiles of W4A16, with clusters")
    asked = parser.parse_args()
    folder: Path = asked.folder.resolve()
    (folder / "units").mkdir(parents=True, exist_ok=True)
    csrc, generated, flags = library()
    units = [*named(csrc), *written(csrc, generated, folder / "units", asked.every_tile)]
    objects, slow = compile_all(units, flags, folder, asked.deadline, asked.jobs)
    print(f"{len(objects)} of {len(units)} units compiled, the slowest in {slow:.0f} s")
    late = {unit.name for unit in units} - {target.stem for target in objects}
    print(f"not in time: {', '.join(sorted(late)) or 'none'}")
    delay = folder / "objects" / f"{Path(DELAY).stem}.o"
    print(f"{link([o for o in objects if o != delay], flags, folder)} functions are left out")
    if delay in objects:
        parts = [str(o) for o in objects if o == delay or o.stem in SHARED]
        _run(["c++", "-shared", "-s", "-o", str(folder / "trtllm_utils.so"), *parts, *_libraries()])
    print(*sorted(folder.glob("*.so")))
    return 0 if len(objects) == len(units) else 1


def library() -> tuple[Path, Path, dict[str, list[str]]]:
    """FlashInfer's sources, where it generated its kernels' list, and the commands it would compile with."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from flashinfer.jit import env
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    spec = gen_cutlass_fused_moe_sm90_module()
    flags: dict[str, list[str]] = {}
    for entry in spec.get_compile_commands():
        compiler, *rest = re.sub(r" -c \S+| -o \S+", "", entry["command"]).split()
        flags["cuda" if entry["file"].endswith(".cu") else "c++"] = [compiler, *rest]
    headers = _cuda_headers()
    flags["cuda"] = [f for f in flags["cuda"] if f != "--compress-mode=size"] + headers
    flags["c++"] += headers
    return env.FLASHINFER_CSRC_DIR, env.FLASHINFER_GEN_SRC_DIR / "cutlass_instantiations/90", flags


def _cuda_headers() -> list[str]:
    """cuBLAS's and cuRAND's come with torch where the toolkit has none."""
    import torch

    found = sorted((Path(torch.__file__).parent.parent / "nvidia").glob("*/include"))
    return [part for folder in found for part in ("-isystem", str(folder))]


def named(csrc: Path) -> Iterator[Unit]:
    for source in (*SOURCES, DELAY):
        path = csrc / source
        yield Unit(path.stem, path)


def written(csrc: Path, generated: Path, folder: Path, every_tile: bool) -> Iterator[Unit]:
    """Units of our own: instantiations of the library's templates, a few in each."""

    def unit(name: str, text: str) -> Unit:
        path = folder / f"{name}.cu"
        path.write_text(text)
        return Unit(name, path)

    for number, types in enumerate(RUNNERS):
        include = csrc / "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
        head = f'#include "{include}"\n#include "moe_kernels.h"\n{NAMESPACE}'
        yield unit(f"runner_{number}", f"{head}template class CutlassMoeFCRunner<{types}>;\n}}\n")
    yield unit("bf16_bf16", f'#include "{csrc / MOE}/moe_gemm_template_dispatch.h"{NO_SM80}')
    for name, head, group in _kernels(generated, every_tile):
        body = "\n".join(group)
        yield unit(name, f"{head}\nnamespace tensorrt_llm::kernels::cutlass_kernels_oss {{\n{body}\n}}\n")


def _kernels(generated: Path, every_tile: bool) -> Iterator[tuple[str, str, list[str]]]:
    """What FlashInfer generates for W4A16 and bf16, by tile: a name, the line that includes, the code."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(generated.glob("gemm_grouped/90/*.cu")):
        text = file.read_text()
        head = text.partition("\n")[0]
        for kernel in re.findall(r"template void sm90\w+<__nv_bfloat16, SafeFP4.*?\);", text, re.S):
            m, n, k, *cluster = map(int, re.findall(r"Int<(\d+)>", kernel)[:5])
            together = m >= 128 and (m, n, k) != (128, 128, 512)
            if ("Pingpong" in kernel) != together and (
                every_tile or (cluster == [1, 1] and (m, n, k) in TILES)
            ):
                found.setdefault((f"w4a16_{m}x{n}x{k}", head), []).append(kernel)
        macro = r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(Sm90, __nv_bfloat16, __nv_bfloat16.*?\);"
        for kernel in re.findall(macro, text, re.S):
            m, n, k, *cluster = map(int, re.findall(r"\b\d+\b", kernel)[:5])
            if "NONE" in kernel and cluster == [1, 1]:
                found.setdefault((f"bf16_{m}x{n}x{k}", head), []).append(kernel)
    for (name, head), kernels in sorted(found.items(), reverse=True):
        yield name, head, kernels


def compile_all(
    units: Iterable[Unit], flags: dict[str, list[str]], folder: Path, deadline: float, jobs: int
) -> tuple[list[Path], float]:
    """The objects that there are in the end, old ones included, and the seconds of the slowest unit."""
    (folder / "objects").mkdir(exist_ok=True)
    started, taken = time.monotonic(), [0.0]

    def compile(unit: Unit) -> Path | None:
        target = folder / "objects" / f"{unit.name}.o"
        left = deadline - (time.monotonic() - started)
        if target.exists() or left <= 0:
            return target if target.exists() else None
        draft, begun = target.with_suffix(".draft"), time.monotonic()
        child = subprocess.Popen(
            unit.command(flags, draft),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return None
        if child.returncode:
            print(f"{unit.name}: {said.decode()[-2000:]}", file=sys.stderr)
            return None
        taken.append(time.monotonic() - begun)
        return draft.rename(target)

    with ThreadPoolExecutor(jobs) as pool:
        objects = [target for target in pool.map(compile, units) if target]
    return objects, max(taken)


def link(objects: list[Path], flags: dict[str, list[str]], folder: Path) -> int:
    """Into FOLDER/fused_moe_90.so; how many functions and tables were missing."""
    source = folder / "units" / "missing.cpp"
    source.write_text(MISSING)
    missing = folder / "objects" / "missing.o"
    _run(Unit("missing", source).command(flags, missing))
    shared = ["c++", "-shared", "-Wl,--unresolved-symbols=ignore-all", "-Wl,--allow-multiple-definition"]
    everything = [*map(str, objects), str(missing)]
    probe = folder / "probe.so"
    _run([*shared, "-o", str(probe), *everything])
    wanted = set(re.findall(r" U ([^@\s]+)", _run(["nm", "-D", "--undefined-only", str(probe)])))
    left_out = sorted(name for name in wanted if "tensorrt_llm" in name or "deep_gemm" in name)
    assembler = folder / "units" / "stubs.s"
    assembler.write_text(stubs(left_out))
    stubbed = folder / "objects" / "stubs.o"
    _run(["c++", "-c", "-fPIC", str(assembler), "-o", str(stubbed)])
    target = ["-Wl,-z,lazy", "-s", "-o", str(folder / "fused_moe_90.so")]
    _run([*shared, *target, *everything, str(stubbed), *_libraries()])
    probe.unlink()
    return len(left_out)


def stubs(names: Iterable[str]) -> str:
    """Assembly that defines `names`: functions that throw, and empty tables of classes."""
    lines = [".text"]
    tables = [name for name in names if re.match(r"_ZT[VIST]", name)]
    for name in names:
        if name not in tables:
            lines += [f".globl {name}", f".type {name},@function", f"{name}: jmp not_built@PLT"]
    lines.append(".data")
    for name in tables:
        lines += [f".globl {name}", f".type {name},@object", f"{name}: .fill 64, 8, 0"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _libraries() -> list[str]:
    """CUDA's, which the module names as needed: the toolkit's, else those that came with torch."""
    import torch
    from flashinfer.jit.cpp_ext import get_cuda_path

    cuda = Path(get_cuda_path())
    folders = [cuda / "lib64", cuda / "lib64/stubs"]
    folders += sorted((Path(torch.__file__).parent.parent / "nvidia").glob("*/lib"))
    found = []
    for name in ("libcudart.so", "libnvrtc.so", "libcuda.so"):
        files = [file for folder in folders for file in sorted(folder.glob(f"{name}*"))]
        if files:
            found.append(str(files[0]))
        else:
            print(f"{name} was not found; it has to be loaded before the module", file=sys.stderr)
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ...: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
