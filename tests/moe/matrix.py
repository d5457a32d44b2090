"""Every (runner, dispatcher, format, activation, numerics) that the registered backends declare.

A runner added to the registry is in the matrix with all it claims; what it refuses is not generated, so
nothing is skipped. CUDA cases carry the `gpu` mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.batched_dispatch import BatchedDispatch
from tests.moe.build import ACTIVATIONS, expert_slice, make_experts, make_plan, make_setup, make_spec
from turnout.formats.experts import ExpertWeights
from turnout.formats.spec import FORMATS
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.planning.backend_refusals import runner_refusals
from turnout.moe.planning.compatibility import compatibility_refusals
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

_references: dict[tuple[Any, ...], Tensor] = {}
LOCAL = {name: DISPATCHERS.load(name) for name in DISPATCHERS} | {"batched": BatchedDispatch}
# The others send tokens even to themselves, and are tested between processes.
LOCAL = {name: cls for name, cls in LOCAL.items() if cls.capability.exchange != "all_to_all"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One entry of the matrix; builds the pipeline dispatch -> run -> combine, and its reference."""

    runner: str
    dispatcher: str
    spec: MoESpec
    activation_format: str
    weight_storage: str
    compute_dtype: str
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.compute_dtype)

    @property
    def deterministic(self) -> bool:
        return RUNNERS[self.runner].deterministic

    def experts(self, seed: int = 0) -> ExpertWeights:
        return _experts(self.spec, seed)

    def pipeline(self, experts: ExpertWeights):
        plan = make_plan(
            self.spec,
            runner=self.runner,
            dispatcher=self.dispatcher,
            layout=LOCAL[self.dispatcher].capability.layout,
            activation_format=self.activation_format,
            weight_storage=self.weight_storage,
            compute_dtype=self.compute_dtype,
            first=experts.first_expert,
            count=experts.num_local_experts,
        )
        device = torch.device(self.device)
        runner = RUNNERS.load(self.runner)(self.spec, plan, device)
        runner.prepare(experts)
        dispatcher = LOCAL[self.dispatcher](make_setup(self.spec, plan, device=device))

        def run(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            batch, state = dispatcher.dispatch(
                *(t.to(device) for t in (x_TH, ids_TK, weights_TK)), (len(x_TH),)
            )
            return dispatcher.combine(runner(batch), state)

        return run

    def reference(self, experts: ExpertWeights, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Computed once for all runners, dispatchers and ways to store weights. experts: of `experts`, or
        slices of those, which share their memory."""
        held = experts.w13.data.data_ptr(), experts.num_local_experts
        inputs = (t.contiguous().view(torch.uint8).numpy().tobytes() for t in (x_TH, ids_TK, weights_TK))
        key = (self.spec, self.activation_format, self.compute_dtype, *held, *inputs)
        if key not in _references:
            _references[key] = experts_reference(
                x_TH,
                ids_TK,
                weights_TK,
                experts,
                self.spec.activation,
                activation_format=self.activation_format,
            )
        return _references[key]

    def slices(self, experts: ExpertWeights, ep: int) -> list[ExpertWeights]:
        count = self.spec.num_experts // ep
        return [expert_slice(experts, rank * count, count) for rank in range(ep)]

    def batch(self, tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], distinct experts per token [T, k], weights [T, k]."""
        draw = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(tokens, self.spec.hidden_size, generator=draw).to(self.dtype)
        weights_TK, ids_TK = torch.rand(tokens, self.spec.num_experts, generator=draw).topk(self.spec.top_k)
        return x_TH, ids_TK.int(), weights_TK


@cache
def _experts(spec: MoESpec, seed: int) -> ExpertWeights:
    return make_experts(spec, seed=seed)


@cache
def cases() -> tuple[pytest.param, ...]:
    """One parameter for each combination that runners and dispatchers of one process claim to support."""
    return tuple(_cases())


def _cases() -> Iterator[pytest.param]:
    devices = {"cpu": hardware.named("cpu"), "cuda": _cuda()}
    numerics = [("float32", a, ACTIVATIONS) for a in ("bf16", "nvfp4", "fp8")]
    numerics += [("bfloat16", a, ACTIVATIONS) for a in ("bf16", "nvfp4", "fp8")]
    for runner, dispatcher, device in product(RUNNERS, LOCAL, devices):
        can, sends = RUNNERS[runner], LOCAL[dispatcher].capability
        for format, (dtype, activation_format, activations) in product(FORMATS, numerics):
            if activation_format not in can.activation_formats:
                continue
            if activation_format == "nvfp4" and format != "nvfp4":
                continue
            if activation_format == "fp8" and format not in can.fp8_weight_formats:
                continue
            if activation_format == "bf16" and format not in can.weight_only_formats:
                continue
            if dtype == "bfloat16" and "float32" in can.compute_dtypes:
                activations = ("silu",)  # the others are covered in float32
            for activation, storage in product(activations, sorted(can.weight_storages)):
                # W8A8 quantises 128 columns together.
                spec = make_spec(
                    activation, format, **({"intermediate_size": 128} if format == "fp8" else {})
                )
                own = runner_refusals(can, spec, Topology(), devices[device], dtype)
                if own or compatibility_refusals(can, sends, spec, "auto"):
                    continue
                case = Case(
                    runner=runner,
                    dispatcher=dispatcher,
                    spec=spec,
                    activation_format=activation_format,
                    weight_storage=storage,
                    compute_dtype=dtype,
                    device=device,
                )
                numbers = f"w-{format}-a-{activation_format}-{dtype}"
                name = "-".join((runner, dispatcher, numbers, activation, storage, device))
                yield pytest.param(case, id=name, marks=[pytest.mark.gpu] if device == "cuda" else [])


def _cuda() -> hardware.Hardware:
    return hardware.detect("cuda") if torch.cuda.is_available() else hardware.named("h200")
