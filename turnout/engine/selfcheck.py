"""`serve --verify`: the runners of this rank's model, checked with the weights they hold before they serve.

Ranks run a short text through the model together (layer_inputs.py); after it each checks its own slice of
the experts, and no rank waits for another.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.engine.engine_plan import EnginePlan
from turnout.engine.layer_inputs import Watch, Watched, largest, prompts
from turnout.errors import UserError
from turnout.models.interface import Model
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import MoEPlan
from turnout.moe.verify import TOKENS, Inputs, Oracle, Result, examine, make_batches
from turnout.vocabulary import Format, Layout, WeightStorage

QUICK_ROWS = 64  # tokens of text where seconds count
SHOWN = 5  # failures that an error message names


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one runner, in one setting, showed on one layer."""

    layer: int
    runner: str
    dispatcher: str
    activation_format: Format
    weight_storage: WeightStorage
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def setting(self) -> str:
        return f"{self.runner} / {self.dispatcher} / {self.activation_format} / {self.weight_storage}"

    @classmethod
    def of(cls, layer: int, plan: MoEPlan, results: Iterable[Result], *, exchanged: bool = True) -> Checked:
        return cls(
            layer=layer,
            runner=plan.prefill.runner,
            dispatcher=plan.prefill.dispatcher if exchanged else "-",
            activation_format=plan.activation_format,
            weight_storage=plan.weight_storage,
            results=tuple(results),
        )


def failures(checked: Iterable[Checked]) -> list[str]:
    """What failed, one line for each layer, setting and kind of fault."""
    found: dict[tuple[int, str, str], list[str]] = {}
    for one in checked:
        for result in one.results:
            if not result.passed:
                found.setdefault((one.layer, one.setting, result.problem), []).append(result.batch)
    return [
        f"layer {layer}, {setting}, batch {', '.join(batches)}: {problem}"
        for (layer, setting, problem), batches in found.items()
    ]


class SelfCheck:
    """`serve --verify`: the runners of this rank's model, as they will serve, with the weights they hold."""

    def __init__(self, engine_plan: EnginePlan, extent: str, device: torch.device) -> None:
        """extent: "quick", the first and the last MoE layer in small batches, or "full", all of them in
        batches up to the budget's maximum. Raises UserError for what cannot be checked."""
        self._engine_plan, self._extent, self._device = engine_plan, extent, device
        capability = RUNNERS[engine_plan.plan.prefill.runner]
        if Layout.TOKENS not in capability.layouts:
            raise UserError(
                f"--verify {extent}: runner {capability.name} takes tokens from its dispatcher only; "
                "use --verify off"
            )
        layers = engine_plan.description.moe_layers
        self._watch = Watch(engine_plan, (layers[0], layers[-1]) if extent == "quick" else layers, device)
        self.make_runner = self._watch.make_runner

    def run(self, model: Model) -> dict[str, Any]:
        """The report, plain values for JSON. Raises UserError if anything is wrong.

        Collective among the ranks that share the model.
        """
        started = time.monotonic()
        engine_plan = self._engine_plan
        (text, *_), kind = prompts(engine_plan, 1, seed=0)
        self._watch.look(model, [text[:QUICK_ROWS] if self._extent == "quick" else text])
        checked = [self._check(layer, one) for layer, one in self._watch.watched.items()]
        for watched in self._watch.watched.values():
            watched.forget()
        wrong = failures(checked)
        if wrong:
            more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            raise UserError(
                f"--verify {self._extent}: the experts do not compute what they should\n"
                + "\n".join(f"  - {line}" for line in [*wrong[:SHOWN], *more])
                + f"\nSee `turnout verify {engine_plan.config.model}` for other backends, and choose one "
                "with --moe-runner-backend; --verify off serves regardless"
            )
        return {
            "extent": self._extent,
            "passed": True,
            "seconds": round(time.monotonic() - started, 3),
            "inputs": kind,
            "layers": [dataclasses.asdict(one) for one in checked],
        }

    @torch.inference_mode()
    def _check(self, layer: int, watched: Watched) -> Checked:
        engine_plan, runner, experts = self._engine_plan, watched.runner, watched.experts
        assert experts is not None, "kept until forgotten"
        spec, plan = engine_plan.experts_of(layer)
        most = TOKENS[-1] if self._extent == "quick" else largest(plan, self._device)
        inputs = watched.inputs().to(self._device, getattr(torch, plan.compute_dtype))
        batches = make_batches(inputs, plan, min(most, largest(plan, self._device)))

        def run(inputs: Inputs) -> Tensor:
            return runner(inputs.batch)

        direct = dataclasses.replace(
            plan,
            prefill=dataclasses.replace(plan.prefill, layout=Layout.TOKENS, wire_format=Format.BF16),
            decode=dataclasses.replace(plan.decode, layout=Layout.TOKENS, wire_format=Format.BF16),
        )
        references = Oracle(spec, experts, batches, self._device)(direct)
        captures = self._device.type == "cuda" and runner.capability.graph_safe
        found = examine(run, runner, direct, batches, references, captures=captures)
        return Checked.of(layer, plan, found, exchanged=False)
