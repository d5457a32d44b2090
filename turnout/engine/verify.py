"""What this machine computes with a model's weights, against the oracle.

1. The model as it would be served reads some text; the inputs of the chosen layers are kept.
2. On each of those layers every combination of runner, dispatcher, activation format and weight storage that
   a plan allows here is put through `moe.verify`, with the weights of the checkpoint.
3. The logits of the served model are compared with a forward in float32 whose experts are the oracle's.

Everything runs in this process, on one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.layer_inputs import ROWS, Watch, forward, largest, load_alone, prompts
from turnout.engine.selfcheck import Checked, failures
from turnout.errors import PlanRefused, Refusal, UserError
from turnout.formats.experts import ExpertWeights
from turnout.models.interface import Model, ProgressFn
from turnout.moe.accuracy import relative_error
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.plan import MoEPlan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec
from turnout.moe.verify import Inputs, Oracle, as_sent, make_batches
from turnout.moe.verify import verify as verify_layer
from turnout.vocabulary import Format, Layout, Phase

PROMPT_TOKENS = 48  # of the forward whose logits are compared

# How far logits may be from the float32 forward's: ||y - ref|| / ||ref||, of each token's logits less their
# mean, on which no probability depends. Rounding also turns close choices of routers, and with a choice
# goes an expert. Measured on the demo model: float32 6e-7, float16 6e-3, bfloat16 4e-2; with NVFP4
# activations 5e-7, 0.12 and 0.11.
LOGITS_BOUNDS = {  # by whether activations are quantised, and the compute dtype
    (False, "float32"): 1e-3,
    (False, "float16"): 0.1,
    (False, "bfloat16"): 0.2,
    (True, "float32"): 0.1,
    (True, "float16"): 0.5,
    (True, "bfloat16"): 0.5,
}


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The served model's logits against the float32 forward's."""

    tokens: int
    error: float
    bound: float
    agreeing: float  # share of tokens whose most likely successor is the same

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `turnout verify` found in the layers that it looked at."""

    engine_plan: EnginePlan
    layers: tuple[int, ...]
    inputs: str  # where they come from
    most: int  # tokens of the largest batch
    checked: tuple[Checked, ...]
    logits: Logits
    refused: tuple[Refusal, ...]

    @property
    def passed(self) -> bool:
        return self.logits.passed and all(one.passed for one in self.checked)

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plan = self.engine_plan.plan
        return {
            "passed": self.passed,
            "model": self.engine_plan.config.model,
            "device": self.engine_plan.hardware.name,
            "compute_dtype": self.engine_plan.compute_dtype,
            "weight_format": self.engine_plan.description.moe.format,
            "inputs": self.inputs,
            "most_tokens": self.most,
            "budget_tokens": max(plan.prefill.max_tokens, plan.decode.max_tokens),
            "layers": self.layers,
            "checked": [dataclasses.asdict(one) | {"passed": one.passed} for one in self.checked],
            "logits": dataclasses.asdict(self.logits) | {"passed": self.logits.passed},
            "failures": failures(self.checked),
            "refused": [dataclasses.asdict(refusal) for refusal in self.refused],
        }


def examine(config: Config, *, layers: str = "", seed: int = 0, progress: ProgressFn) -> Report:
    """All checks.

    layers: "first", "all", or indices such as "0,3"; by default the first MoE layer and the last.
    Raises UserError for a model that cannot be found, described or read, PlanRefused if nothing can run it.
    """
    if config.tp_size > 1:
        raise UserError(
            f"--tp-size {config.tp_size}: verify runs on one rank; use --tp-size 1, or `turnout serve "
            "--verify full`, with which every rank checks its part of the experts"
        )
    engine_plan = resolve(config)
    chosen = choose_layers(layers, engine_plan)
    device = torch.device(engine_plan.hardware.device)
    plans, refused = _allowed(config)
    most = largest(engine_plan.plan, device)
    texts, kind = prompts(engine_plan, min(most, ROWS), seed)
    start = texts[0][:PROMPT_TOKENS]

    watch = Watch(engine_plan, chosen, device)
    served = load_alone(engine_plan, engine_plan.plan, device, progress, watch.make_runner)
    watch.look(served, texts)
    ours = _logits(served, start, device)
    seen = {layer: (watched.experts, watched.inputs()) for layer, watched in watch.watched.items()}
    del served, watch  # with its weights
    checked: list[Checked] = []
    for layer, (experts, inputs) in seen.items():
        assert experts is not None, "kept until forgotten"
        bench = _Bench(layer, engine_plan, experts, inputs, most, device)
        for plan in plans:
            progress("checking layers", len(checked), len(chosen) * len(plans))
            checked.append(bench.check(plan))
    return Report(
        engine_plan=engine_plan,
        layers=chosen,
        inputs=kind,
        most=most,
        checked=tuple(checked),
        logits=_compare(ours, _oracle_logits(engine_plan, start, device, progress), engine_plan),
        refused=refused,
    )


def choose_layers(wanted: str, engine_plan: EnginePlan) -> tuple[int, ...]:
    """The MoE layers that `--layers` names. Raises UserError."""
    every = engine_plan.description.moe_layers
    if wanted in ("", "first", "all"):
        return {"": tuple(dict.fromkeys((every[0], every[-1]))), "first": every[:1], "all": every}[wanted]
    words = [word.strip() for word in wanted.split(",")]
    wrong = [word for word in words if not word.isdecimal() or int(word) not in every]
    if wrong:
        raise UserError(
            f"--layers {wanted}: {', '.join(map(repr, wrong))} names no MoE layer of "
            f"{engine_plan.config.model}; use first, all, or some of {', '.join(map(str, every))}"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


class _Bench:
    """One layer's weights and inputs, on which plans are tried."""

    def __init__(
        self,
        layer: int,
        engine_plan: EnginePlan,
        experts: ExpertWeights,
        inputs: Inputs,
        most: int,
        device: torch.device,
    ) -> None:
        self._layer, self._spec, self._device = layer, engine_plan.description.moe, device
        self._experts = experts
        inputs = inputs.to(device, getattr(torch, engine_plan.compute_dtype))
        self._batches = make_batches(inputs, engine_plan.plan, most)
        self._oracle = Oracle(self._spec, experts, self._batches, device)

    @torch.inference_mode()
    def check(self, plan: MoEPlan) -> Checked:
        found = verify_layer(self._spec, plan, self._experts, self._batches, self._oracle, self._device)
        return Checked.of(self._layer, plan, found)


def _allowed(config: Config) -> tuple[list[MoEPlan], tuple[Refusal, ...]]:
    """The plans of every combination that `config` leaves open, and why others are refused."""
    plans: list[MoEPlan] = []
    refused: dict[Refusal, None] = {}
    for choice in _choices(config):
        try:
            plans.append(resolve(choice).plan)
        except PlanRefused as error:
            refused |= dict.fromkeys(error.refusals)
    return plans, tuple(refused)


def _choices(config: Config) -> Iterator[Config]:
    """`config` with each combination of what it leaves to `auto`."""
    declared = {field.name: field.metadata["choices"] for field in dataclasses.fields(Config)}
    every: dict[str, Sequence[str]] = {
        "moe_runner_backend": tuple(RUNNERS),
        "moe_a2a_backend": tuple(DISPATCHERS),
        "moe_activation_dtype": [name for name in declared["moe_activation_dtype"] if name != "auto"],
        "moe_weight_storage": [name for name in declared["moe_weight_storage"] if name != "auto"],
    }
    left_open = {name: values for name, values in every.items() if getattr(config, name) == "auto"}
    for values in product(*left_open.values()):
        chosen: dict[str, Any] = dict(zip(left_open, values, strict=True))
        yield replace(config, **chosen)


# Logits


class OracleExperts:
    """The experts of one layer, computed by the oracle in float32."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._spec, self._plan, self._device = spec, plan, device

    def prepare(self, experts: ExpertWeights) -> None:
        w13, w2 = experts.w13.to(self._device), experts.w2.to(self._device)
        self._experts = replace(experts, w13=w13, w2=w2)

    update = prepare

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch), "the dispatcher that moves nothing gives tokens"
        return experts_reference(
            as_sent(batch.hidden.data, self._experts, self._plan.prefill.wire_format),
            batch.topk_ids,
            batch.topk_weights,
            self._experts,
            self._spec.activation,
            activation_format=self._plan.activation_format,
        )


def _oracle_logits(
    engine_plan: EnginePlan, ids: Sequence[int], device: torch.device, progress: ProgressFn
) -> Tensor:
    """float32 [N, V] of a forward in float32 throughout, its experts the oracle's."""
    plan, spec = engine_plan.plan, engine_plan.description.moe
    # Tokens stay where they are, and are rounded as if they had been dispatched.
    plain = replace(plan.prefill, dispatcher="none", layout=Layout.TOKENS, wire_format=Format.BF16)
    plan = replace(plan, compute_dtype="float32", prefill=plain, decode=replace(plain, phase=Phase.DECODE))
    model = load_alone(
        engine_plan, plan, device, progress, lambda _: OracleExperts(spec, engine_plan.plan, device)
    )
    return _logits(model, ids, device)


@torch.inference_mode()
def _logits(model: Model, ids: Sequence[int], device: torch.device) -> Tensor:
    """float32 [N, V] on the CPU."""
    return model.logits(forward(model, ids, device)).cpu()


def _compare(ours_NV: Tensor, wanted_NV: Tensor, engine_plan: EnginePlan) -> Logits:
    same_N = ours_NV.argmax(-1) == wanted_NV.argmax(-1)
    centred = (x - x.mean(-1, keepdim=True) for x in (ours_NV, wanted_NV))
    plan = engine_plan.plan
    rounds = plan.activation_format != Format.BF16 or plan.prefill.wire_format != Format.BF16
    return Logits(
        tokens=len(ours_NV),
        error=relative_error(*centred),
        bound=LOGITS_BOUNDS[rounds, engine_plan.compute_dtype],
        agreeing=same_N.float().mean().item(),
    )
