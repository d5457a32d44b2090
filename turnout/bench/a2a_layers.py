"""What `bench a2a` sends: a layer of a shape, planned for a dispatcher and a format, its tokens and routes.

Legend: T tokens, H hidden, E experts, k top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from turnout.formats import nvfp4
from turnout.formats.codec import encode
from turnout.formats.experts import ExpertWeights, InputScales
from turnout.formats.packed import PackedTensor
from turnout.moe import plan
from turnout.moe.budget import Budget
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import MoEPlan, PlanRequest
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Groups
from turnout.parallel.hardware import Hardware
from turnout.vocabulary import Format, Phase

ROUTINGS = ("uniform", "zipf")
ZIPF = 1.2  # a place's popularity is its power to minus this
INTERMEDIATE = 32  # of the layer; what is sent does not depend on it
CHECKED_TOKENS = (3, 0, 17, 1)  # by rank, in turn, of a layer that is compared with the reference
INPUT_SCALE = 6 / nvfp4.GLOBAL_MAX  # of the layer's input, whose values reach about 5


class Formats(NamedTuple):
    """What tokens are dispatched in, and what results come back in."""

    there: Format
    back: Format = Format.BF16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; the same on all ranks."""

    world_size: int
    hidden: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    dispatchers: tuple[str, ...]
    formats: tuple[str, ...]
    combine_formats: tuple[str, ...]
    routings: tuple[str, ...]
    device: str


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers as `settings` have them, on this rank."""

    settings: Settings
    groups: Groups
    device: torch.device
    dtype: torch.dtype
    hardware: Hardware

    def spec(self, format: Format) -> MoESpec:
        """nvfp4 is sent where a calibrated nvfp4 checkpoint says with what scales."""
        s, calibrated = self.settings, format == Format.NVFP4
        return MoESpec(
            hidden_size=s.hidden,
            intermediate_size=INTERMEDIATE,
            num_experts=s.experts,
            top_k=s.top_k,
            format=Format.NVFP4 if calibrated else Format.BF16,
            quantized_activations=calibrated,
        )

    def plan(self, spec: MoESpec, dispatcher: str, formats: Formats) -> MoEPlan:
        largest = max(*self.settings.tokens, *CHECKED_TOKENS)
        return plan(
            spec,
            topology=self.groups.topology,
            budget=Budget.from_limits(
                chunked_prefill_size=largest,
                max_prefill_tokens=largest,
                max_running_requests=1,
                dp_size=self.settings.world_size,
            ),
            hardware=self.hardware,
            request=PlanRequest(
                moe_runner_backend="torch",
                moe_a2a_backend=dispatcher,
                moe_dispatch_dtype=formats.there,
                moe_combine_dtype=formats.back,
                moe_activation_dtype=Format.BF16,
            ),
            compute_dtype="float32" if self.dtype == torch.float32 else "bfloat16",
        )

    def setup(self, spec: MoESpec, chosen: MoEPlan) -> DispatchSetup:
        return DispatchSetup(
            spec=spec,
            plan=chosen,
            phase=Phase.PREFILL,
            groups=self.groups,
            device=self.device,
            input_scale=torch.tensor(INPUT_SCALE, device=self.device),
        )

    def inputs(self, tokens: int, routing: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's x [T, H], ids int32 [T, k], weights float32 [T, k] summing to 1."""
        E, k = self.settings.experts, self.settings.top_k
        popularity_E = torch.ones(E)
        if routing == "zipf":  # the same experts are popular with all ranks
            place_E = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
            popularity_E = (1.0 + place_E) ** -ZIPF
        draw = torch.Generator(self.device).manual_seed(1000 * seed + self.groups.world.rank)
        x_TH = torch.randn(tokens, self.settings.hidden, generator=draw, device=self.device)
        ids_TK = torch.zeros(0, k, device=self.device)
        if tokens:
            ids_TK = torch.multinomial(popularity_E.to(self.device).expand(tokens, E), k, generator=draw)
        weights_TK = torch.rand(tokens, k, generator=draw, device=self.device).softmax(dim=-1)
        return x_TH.to(self.dtype), ids_TK.int(), weights_TK

    def experts(self, spec: MoESpec) -> tuple[ExpertWeights, Tensor]:
        """All experts of the layer, and the router's weight [E, H]; the same on ranks with equal devices."""
        draw = torch.Generator(self.device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=self.device)

        def weights(rows: int, columns: int) -> PackedTensor:
            plain = normal(spec.num_experts, rows, columns).mul_(columns**-0.5)
            return encode(plain, spec.format)

        scale_E = torch.full((spec.num_experts,), INPUT_SCALE, device=self.device)
        experts = ExpertWeights(
            w13=weights(spec.w13_rows, spec.hidden_size),
            w2=weights(spec.hidden_size, spec.intermediate_size),
            input_scales=InputScales(w13=scale_E, w2=scale_E) if spec.quantized_activations else None,
            num_experts=spec.num_experts,
        )
        return experts, normal(spec.num_experts, spec.hidden_size)
