"""The step of Gated DeltaNet on slots, in Triton's interpreter and on a GPU, against torch's."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.compiled import compiled


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention/delta_rule_in_interpreter.py")


@pytest.mark.parametrize(
    "case",
    [
        *("one", "several", "none", "four-value-heads", "odd-sizes", "shortest-window"),
        *("columns", "columns-parts", "columns-odd-sizes"),
        *("prompt", "prompt-of-one", "prompt-of-two", "prompt-of-two-spans", "prompt-odd-sizes"),
        *("prompt-shortest-window", "prompt-alike"),
    ],
)
def test_interpreted(results: dict[str, bool], case: str) -> None:
    assert results[case]


@pytest.mark.parametrize("parts", [1, 4])
def test_columns_of_few_requests_compile_for_hopper(parts: int) -> None:
    """Who is done says so after a barrier of its threads, and sees what others left before they were."""
    from turnout.kernels.attention.delta_rule import COLUMNS, step_columns

    halves = dict.fromkeys(("windows_ptr", "conv_ptr", "norm_ptr"), "*bf16")
    mixed = "*bf16" if parts == 1 else "*fp32"
    constants = {"R": 2, "DK": 128, "DV": 128, "DKP": 128, "DVP": 128, "COLUMNS": COLUMNS, "W": 4, "WP": 4}
    constants |= {"PARTS": parts, "PDL": True, "scale": 0.1, "eps": 1e-6}
    done = compiled(
        step_columns, constants, warps=4, multiples=("X", "Hk"), mixed_ptr=mixed, slots_ptr="*i64",
        positions_ptr="*i64", done_ptr="*i32", **halves,
    )  # fmt: skip
    before, found, after = done.asm["ptx"].partition("atom.global.gpu.acq_rel.add")
    assert found
    assert before.rindex("bar.sync") > before.rindex("st.global")
    assert "bar.sync" in after[: after.index("ld.global.cg")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "parts"), [(1, 0), (1, 4), (3, 0), (4, 4)])
def test_few_requests_on_a_gpu(dtype: torch.dtype, requests: int, parts: int) -> None:
    from tests.kernels.attention.delta_rule_cases import close

    bound, sizes = 2e-4 if dtype == torch.float32 else 2e-2, {"heads": (16, 32), "sizes": (128, 128)}
    assert close(requests, **sizes, device="cuda", dtype=dtype, bound=bound, columns=True, parts=parts)


@pytest.mark.gpu
def test_columns_follow_heads_over_many_tokens_on_a_gpu() -> None:
    """The programs of a key head agree on who is last, each time."""
    from tests.kernels.attention.delta_rule_cases import drawn_cell, learned
    from turnout.kernels.attention.delta_rule import FEW, step

    draw = torch.Generator().manual_seed(0)
    cell = drawn_cell(draw, (16, 32), (128, 128), 4, torch.bfloat16)
    mixed = torch.randn(300, FEW, cell.spec.mixed, generator=draw).bfloat16().cuda()
    slots, done = torch.arange(FEW).cuda(), torch.zeros(16 * FEW, dtype=torch.int32, device="cuda")
    found = []
    for counter in (None, done):
        windows = torch.zeros(FEW, 3, cell.spec.channels, dtype=torch.bfloat16, device="cuda")
        states = torch.zeros(FEW, 32, 128, 128, device="cuda")
        rest = windows, states, *learned(cell, "cuda", torch.bfloat16)
        outs = [step(row, slots, torch.full_like(slots, t), *rest, counter) for t, row in enumerate(mixed)]
        found.append((torch.stack(outs), windows, states))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-2, atol=2e-2)
    assert not done.count_nonzero()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "heads"), [(1, (16, 32)), (33, (16, 32)), (128, (16, 64))])
def test_on_a_gpu(dtype: torch.dtype, requests: int, heads: tuple[int, int]) -> None:
    """At the sizes of 35B-A3B and 397B-A17B."""
    from tests.kernels.attention.delta_rule_cases import close

    bound = 2e-4 if dtype == torch.float32 else 2e-2
    assert close(requests, heads=heads, sizes=(128, 128), device="cuda", dtype=dtype, bound=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 1500])
def test_prompts_on_a_gpu(tokens: int, alike: bool, dtype: torch.dtype) -> None:
    from tests.kernels.attention.delta_rule_cases import advanced

    bound, sizes = 2e-2 if dtype == torch.bfloat16 else 2e-3 if alike else 2e-4, (128, 128)
    assert advanced(tokens, heads=(4, 8), sizes=sizes, alike=alike, device="cuda", dtype=dtype, bound=bound)


@pytest.mark.gpu
def test_reads_and_writes_states_at_the_speed_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the share of an H200's 4.2 TB/s for 64 requests of 35B-A3B; several layers, beyond any cache."""
    from turnout.kernels.attention.delta_rule import step

    B, Hv, C, layers = 64, 32, 8192, 8
    states = torch.zeros(layers, B, Hv, 128, 128, device="cuda")
    windows = torch.zeros(layers, B, 3, C, device="cuda", dtype=torch.bfloat16)
    mixed = torch.randn(B, C + Hv * 130, device="cuda", dtype=torch.bfloat16)
    slots, positions = torch.arange(B, device="cuda"), torch.ones(B, dtype=torch.int64, device="cuda")
    conv = torch.randn(4, C, device="cuda", dtype=torch.bfloat16)
    decay, bias, norm = -torch.ones(Hv, device="cuda"), *(torch.ones(n, device="cuda") for n in (Hv, 128))

    def run() -> None:
        for layer in range(layers):
            step(mixed, slots, positions, windows[layer], states[layer], conv, decay, bias, norm, 1e-6)

    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    rate = 20 * 2 * states.nbytes / (begin.elapsed_time(end) / 1e3)
    with capsys.disabled():
        print(f"\nstates read and written at {rate / 1e12:.2f} TB/s, {rate / 4.2e12:.2f} of 4.2")
    assert states.isfinite().all()
    assert rate > 0.5e12
