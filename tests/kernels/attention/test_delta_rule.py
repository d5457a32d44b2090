"""The step of Gated DeltaNet on slots, in Triton's interpreter and on a GPU, against torch's."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention/delta_rule_in_interpreter.py")


@pytest.mark.parametrize(
    "case",
    [
        *("one", "several", "none", "four-value-heads", "odd-sizes", "shortest-window"),
        *("prompt", "prompt-of-one", "prompt-of-two", "prompt-of-two-spans", "prompt-odd-sizes"),
        *("prompt-shortest-window", "prompt-alike"),
    ],
)
def test_interpreted(results: dict[str, bool], case: str) -> None:
    assert results[case]


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
