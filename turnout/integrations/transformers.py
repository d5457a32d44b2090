"""Turnout's expert GEMMs in any transformers model that lets its experts be exchanged.

    import turnout.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="turnout")

Importing this registers the name; the runner is what `turnout.moe.plan` chooses for the device. It keeps
its own copy of the weights, in its layout, and makes it again when a parameter is replaced, moved or changed
in place (changes through `.data` cannot be seen). For inference only: a backward pass is an error, and so
is an expert MLP that Turnout does not compute. FP8 experts, which transformers registers apart, stay its own.

Legend: T tokens, H hidden, E experts, I intermediate, N outputs of GEMM1 (2I, or I when not gated), k top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from turnout.errors import UserError
from turnout.formats.experts import ExpertWeights
from turnout.formats.layouts import deinterleave_gate_up_rows
from turnout.formats.packed import PackedTensor
from turnout.kernels.common.sizes import power_of_two
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.budget import Budget
from turnout.moe.interface import Experts
from turnout.moe.plan import plan
from turnout.moe.reference import activate
from turnout.moe.runner_by_batch_size import make_runner
from turnout.moe.spec import Activation, MoESpec
from turnout.parallel.hardware import detect
from turnout.parallel.topology import Topology
from turnout.vocabulary import ActivationKind, ComputeDtype, Format

NAME = "turnout"
REMEDY = 'use experts_implementation="eager" for this model'
FIRST_TOKENS = 2048  # the batch planned for first; for a larger one, plans again for the next power of two
DTYPES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@torch.compiler.disable
def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of the transformers module `self`, in its dtype.

    hidden_states [T, H] float32, bfloat16 or float16; top_k_index integers [T, k], of which those from
    `self.num_experts` on are another rank's and are skipped; top_k_weights [T, k]. Returns [T, H].
    Raises UserError for a module that computes something else than Turnout can, or another dtype.
    """
    out: Tensor = _InferenceOnly.apply(hidden_states, top_k_weights, top_k_index, self)
    return out


class _InferenceOnly(torch.autograd.Function):
    """Connects the output to the inputs, so that training fails aloud instead of skipping the experts."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, module: Any) -> Tensor:
        runner = _prepared(module, x_TH, ids_TK.shape[1]).runner
        absent_TK = ids_TK >= module.num_experts
        return runner(
            TokensBatch(
                hidden=Hidden(data=x_TH),
                topk_ids=ids_TK.masked_fill(absent_TK, -1).int(),
                topk_weights=weights_TK.masked_fill(absent_TK, 0).float(),
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UserError(f'experts_implementation="{NAME}" is for inference only; train with "grouped_mm"')


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A module's experts, ready to run, and what they were made from."""

    runner: Experts
    made_from: tuple[Any, ...]
    max_tokens: int


_PREPARED: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


def _prepared(module: nn.Module, x_TH: Tensor, top_k: int) -> _Prepared:
    made_from = (x_TH.dtype, x_TH.device, top_k, *map(_state, module.parameters()))
    kept = _PREPARED.get(module)
    if kept is None or kept.made_from != made_from or kept.max_tokens < len(x_TH):
        _PREPARED.pop(module, None)  # before the new copy is made
        del kept
        most = max(FIRST_TOKENS, power_of_two(len(x_TH)))
        kept = _Prepared(runner=_prepare(module, x_TH, top_k, most), made_from=made_from, max_tokens=most)
        _PREPARED[module] = kept
    return kept


def _state(parameter: Tensor) -> tuple[int, int]:
    """Changes when the parameter moves or is written to; inference tensors count no versions."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def _prepare(module: Any, x_TH: Tensor, top_k: int, max_tokens: int) -> Experts:
    if x_TH.dtype not in DTYPES:
        raise UserError(
            f'experts_implementation="{NAME}" computes in {", ".join(DTYPES.values())}, not {x_TH.dtype}'
        )
    experts = _weights(module)
    E, H, I = experts.w2.shape
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=top_k,
        activation=_activation(module, x_TH.device),
        expert_bias=module.has_bias,
    )
    chosen = plan(
        spec,
        topology=Topology(),
        budget=Budget.from_limits(
            chunked_prefill_size=max_tokens, max_prefill_tokens=max_tokens, max_running_requests=max_tokens
        ),
        hardware=detect(x_TH.device.type),
        compute_dtype=DTYPES[x_TH.dtype],
        stored_itemsize=experts.w13.data.element_size(),
    )
    runner = make_runner(spec, chosen, x_TH.device)
    runner.prepare(experts)
    return runner


def _weights(module: Any) -> ExpertWeights:
    """The module's parameters in canonical form; views of them where they have it already."""
    if getattr(module, "has_post_expert_norm", False):
        raise UserError(
            f"{type(module).__name__} norms each expert's output, which Turnout does not; {REMEDY}"
        )
    first = "gate_up_proj" if module.has_gate else "up_proj"
    w13_ENH, w2_EHI = (_parameter(module, name) for name in (first, "down_proj"))
    b13_EN, b2_EH = None, None
    if module.has_bias:
        b13_EN, b2_EH = (_parameter(module, f"{name}_bias").float() for name in (first, "down_proj"))
    if module.is_transposed:
        w13_ENH, w2_EHI = w13_ENH.transpose(1, 2), w2_EHI.transpose(1, 2)
    if module.has_gate and not module.is_concatenated:
        w13_ENH = deinterleave_gate_up_rows(w13_ENH)
        b13_EN = None if b13_EN is None else deinterleave_gate_up_rows(b13_EN, dim=-1)
    return ExpertWeights(
        w13=PackedTensor(format=Format.BF16, data=w13_ENH.contiguous()),
        w2=PackedTensor(format=Format.BF16, data=w2_EHI.contiguous()),
        b13=b13_EN,
        b2=b2_EH,
        num_experts=len(w13_ENH),
    )


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name, None)
    if not isinstance(parameter, Tensor) or parameter.dtype not in DTYPES:
        found = f"is {parameter.dtype}" if isinstance(parameter, Tensor) else "is missing"
        raise UserError(
            f"{type(module).__name__}.{name} {found}: Turnout takes unquantised weights here; {REMEDY}"
        )
    return parameter.detach()


def _activation(module: Any, device: torch.device) -> Activation:
    """The activation of ours that equals the module's own on a grid of values: names promise too little."""
    limit = getattr(module, "limit", None)
    candidates = [
        Activation(),
        Activation(kind=ActivationKind.SWIGLU, limit=limit),
        Activation(kind=ActivationKind.SWIGLU, alpha=getattr(module, "alpha", 1.0), beta=1.0, limit=limit),
    ]
    reach = 2 * max(limit or 0, 16)  # to both sides of every clamp
    grid = torch.linspace(-reach, reach, 65, device=device)
    gate, up = (part.flatten() for part in torch.meshgrid(grid, grid, indexing="ij"))
    halves, rows = torch.cat((gate, up))[None], torch.stack((gate, up), dim=1).flatten()[None]
    if module.has_gate:
        theirs = module._apply_gate(halves if module.is_concatenated else rows)
    else:
        candidates, halves = [Activation(kind=ActivationKind.RELU2)], grid[None]
        theirs = module.act_fn(halves)
    for candidate in candidates:
        if torch.allclose(theirs, activate(halves, candidate), rtol=1e-4, atol=1e-4):
            return candidate
    raise UserError(f"{type(module).__name__} has an activation that Turnout does not compute; {REMEDY}")


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
