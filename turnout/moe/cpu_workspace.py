"""What the kernels for CPUs need beside weights, for plans. No torch here."""

from __future__ import annotations

from turnout.moe.spec import MoESpec


def workspace_bytes(
    spec: MoESpec,
    *,
    rows: int,
    layout: str,
    num_local_experts: int,
    expert_tp: int,
    decoded: bool,
    itemsize: int,
    activations: str = "bf16",
) -> int:
    """For a batch of `rows` tokens, or slabs of as many rows: input and output in float32, and for each pair
    the activation's output, its token and its weight. What threads unpack a panel into is not counted."""
    inner, held = spec.intermediate_size // expert_tp, rows
    pairs = rows * min(spec.top_k, num_local_experts)
    if layout == "experts":
        pairs = held = rows * num_local_experts
    return pairs * (4 * inner + 8 + 4) + 2 * held * spec.hidden_size * 4
