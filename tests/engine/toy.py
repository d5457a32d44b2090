"""A tiny transformer written for these tests alone, so that the engine is tested without any other part.

Everything is float32 and seeded. `reference_logits` computes the same network over a whole sequence
with a plain masked softmax: no cache, no pages, no chunks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import EnginePlan, MemoryTable
from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.sampling.greedy import greedy
from turnout.engine.sampling_params import SamplingParams
from turnout.models.interface import DenseParameters, ModelDescription, ModelShape, Step
from turnout.moe.budget import Budget
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology

SHAPE = ModelShape(
    architecture="Toy",
    attention=(AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8),) * 2,
    hidden_size=32,
    vocab_size=50,
    max_position_embeddings=256,
    eos_token_ids=(49,),
)


class ToyModel:
    """An `interface.Model`. Logits depend strongly on position and on every earlier token.

    drafts: the last layer is a draft layer, which makes it a `DraftingModel`.
    """

    def __init__(self, seed: int = 0, shape: ModelShape = SHAPE, *, drafts: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self._layers = shape, range(shape.num_layers - drafts)
        H = shape.hidden_size

        def random(*size: int, scale: float) -> Tensor:
            return torch.randn(*size, generator=generator) * scale

        self.embedding = random(shape.vocab_size, H, scale=1.0)
        self.position = random(shape.max_position_embeddings, H, scale=0.5)
        self.qkv = [random(_rows(layer), H, scale=0.3) for layer in shape.attention]
        self.out = [random(H, layer.num_heads * layer.value_dim, scale=0.5) for layer in shape.attention]
        self.sinks = [
            random(layer.num_heads, scale=1.0) if layer.sinks else None for layer in shape.attention
        ]
        self.head = random(shape.vocab_size, H, scale=1.0)
        self.cells = {
            i: DeltaCell(
                spec=layer,
                conv_WC=random(layer.conv_width, layer.channels, scale=0.5),
                decay_H=-random(layer.num_heads, scale=1.0).exp(),
                bias_H=random(layer.num_heads, scale=1.0),
                norm_D=random(layer.value_dim, scale=1.0),
                eps=1e-6,
            )
            for i, layer in enumerate(shape.attention)
            if isinstance(layer, DeltaNetSpec)
        }
        self.steps: list[int] = []  # tokens of each forward
        self.layers_begun = 0
        self.poison: int | None = None  # a token whose presence makes NaN

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, step: Step) -> Tensor:
        self.steps.append(len(step.input_ids))
        x = self._embed(step.input_ids, step.positions)
        for layer in self._layers:
            if layer in self.cells:
                y = step.attention.recur(layer, self._normed(x) @ self.qkv[layer].T, self.cells[layer])
                x = x + y @ self.out[layer].T
                continue
            x = self._attend(layer, x, step)
        return x

    def draft(self, step: Step, hidden_NH: Tensor) -> Tensor:
        x = self._embed(step.input_ids, step.positions) + hidden_NH
        return self._attend(self.shape.num_layers - 1, x, step)

    def _attend(self, layer: int, x: Tensor, step: Step) -> Tensor:
        q, k, v = self._project(layer, x)
        return x + step.attention(layer, q, k, v, self.sinks[layer]).flatten(1) @ self.out[layer].T

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return hidden_SH @ self.head.T

    def best(self, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        return greedy(logits_SV.copy_(self.logits(hidden_SH)), near_ties=False)

    def expert_counts(self) -> list[list[int]]:
        return [[sum(self.steps)]]

    def reset_counts(self) -> None:
        self.steps.clear()

    def reference_logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), V], by definition."""
        shape = self.shape
        x = self._embed(torch.tensor(tokens), torch.arange(len(tokens)))
        for layer in self._layers:
            spec = shape.attention[layer]
            if layer in self.cells:
                y = _gated_delta_net(self._normed(x) @ self.qkv[layer].T, self.cells[layer])
                x = x + y @ self.out[layer].T
                continue
            q, k, v = self._project(layer, x)
            group = spec.num_heads // spec.num_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
            ages = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
            hidden = (ages < 0) | (ages >= (spec.window or len(tokens)))
            scores = scores.masked_fill(hidden, float("-inf"))
            if spec.sinks:
                sinks = self.sinks[layer][:, None, None].expand(-1, len(tokens), 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : len(tokens)]
            x = x + torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1) @ self.out[layer].T
        return x @ self.head.T

    def greedy(self, prompt: list[int], count: int, *, eos: bool = True) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.reference_logits(tokens)[-1].argmax()))
            if eos and tokens[-1] in self.shape.eos_token_ids:
                break
        return tokens[len(prompt) :]

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding[ids] + self.position[positions]
        if self.poison is not None:
            x = torch.where((ids == self.poison)[:, None], float("nan"), x)
        return x

    def _normed(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.shape.attention[layer]
        heads = (self._normed(x) @ self.qkv[layer].T).unflatten(1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return q, k, v


def _rows(layer: AttentionSpec) -> int:
    if isinstance(layer, DeltaNetSpec):
        return layer.mixed
    return (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim


def _gated_delta_net(mixed_TX: Tensor, cell: DeltaCell) -> Tensor:
    """Of a whole sequence, token by token, by definition."""
    spec = cell.spec
    Hk, Hv, Dk, Dv = spec.num_kv_heads, spec.num_heads, spec.head_dim, spec.value_dim
    qkv, z, b, a = mixed_TX.split([spec.channels, Hv * Dv, Hv, Hv], dim=1)
    padded = F.pad(qkv, (0, 0, spec.conv_width - 1, 0))
    taps = [padded[i : i + len(qkv)] * cell.conv_WC[i] for i in range(spec.conv_width)]
    q, k, v = F.silu(sum(taps)).split([Hk * Dk, Hk * Dk, Hv * Dv], dim=1)
    state, out = torch.zeros(Hv, Dk, Dv), []
    for t in range(len(qkv)):
        q_HK, k_HK = (F.normalize(x[t].view(Hk, Dk), dim=1).repeat_interleave(Hv // Hk, 0) for x in (q, k))
        state = state * (cell.decay_H * F.softplus(a[t] + cell.bias_H)).exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k_HK)
        d = b[t].sigmoid()[:, None] * (v[t].view(Hv, Dv) - known)
        state = state + k_HK[:, :, None] * d[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q_HK) / Dk**0.5)
    normed = F.rms_norm(torch.stack(out), (Dv,), cell.norm_D, cell.eps)
    return normed.flatten(1) * F.silu(z)


def make_core(
    model: ToyModel | None = None,
    *,
    num_pages: int = 64,
    max_context: int = 128,
    drafts_rest: bool = False,
    step_sync: StepSync | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **flags: object,
) -> EngineCore:
    """An engine over a toy model; `flags` are fields of `Config`. drafts_rest: where they do not pay by
    `clock`, which times its steps."""
    model = model or ToyModel()
    values = {"page_size": 4, "max_running_requests": 8, "chunked_prefill_size": 16, "num_threads": 1}
    config = Config(**(values | flags))  # type: ignore[arg-type]
    plan = engine_plan(config, model.shape, num_pages=num_pages, max_context=max_context)
    core = build_engine(plan, model=model, step_sync=step_sync, clock=clock)
    return core if drafts_rest else always_drafting(core)


def always_drafting(core: EngineCore) -> EngineCore:
    """The engine without its `DraftSwitch`, which goes by the clock, so that a test can count its drafts."""
    core._scheduler.switch = None
    return core


def engine_plan(config: Config, shape: ModelShape, *, num_pages: int, max_context: int) -> EnginePlan:
    """What the planner would hand over, for a model without experts."""
    config = dataclasses.replace(config, max_prefill_tokens=config.max_prefill_tokens or 2048)
    phase = PhasePlan(
        phase="prefill",
        runner="torch",
        dispatcher="none",
        layout="tokens",
        wire_format="bf16",
        reduce="none",
        max_tokens=config.max_prefill_tokens,
    )
    moe = MoESpec(hidden_size=shape.hidden_size, intermediate_size=1, num_experts=1, top_k=1)
    return EnginePlan(
        config=config,
        folder=Path("toy"),
        description=ModelDescription(shape=shape, moe=moe, moe_layers=(), dense=DenseParameters()),
        topology=Topology(),
        hardware=Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=2**30),
        compute_dtype="float32",
        budget=Budget.from_limits(
            chunked_prefill_size=config.chunked_prefill_size,
            max_prefill_tokens=config.max_prefill_tokens,
            max_running_requests=config.max_running_requests,
            draft_tokens=config.verified_tokens,
        ),
        plan=MoEPlan(
            prefill=phase,
            decode=phase,
            activation_format="bf16",
            weight_storage="decoded",
            compute_dtype="float32",
            first_expert=0,
            num_local_experts=1,
            weight_bytes=0,
            workspace_bytes=0,
            dispatch_bytes=0,
        ),
        page_size=config.page_size,
        num_pages=num_pages,
        max_context=max_context,
        memory=MemoryTable(**{f.name: 0 for f in dataclasses.fields(MemoryTable)}),
    )


def request(id: str, prompt: list[int], **sampling: object) -> AddRequest:
    return AddRequest(id=id, prompt_ids=prompt, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[AddRequest]) -> dict[str, RequestOutput]:
    """Run all to the end; each request's outputs merged into one."""
    for message in requests:
        core.add(message)
    return collect(core)


def collect(core: EngineCore, *, limit: int = 10_000) -> dict[str, RequestOutput]:
    merged: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not core.has_work():
            return merged
        for output in core.step():
            merge(merged, output)
    raise AssertionError("the engine does not come to an end")


def merge(merged: dict[str, RequestOutput], output: RequestOutput) -> None:
    whole = merged.setdefault(output.id, RequestOutput(id=output.id))
    assert whole.finish_reason is None, "an output after the last"
    whole.token_ids = whole.token_ids + output.token_ids
    if output.logprobs is not None:
        whole.logprobs = (whole.logprobs or []) + output.logprobs
    whole.prompt_logprobs = whole.prompt_logprobs or output.prompt_logprobs
    whole.cached_tokens = whole.cached_tokens or output.cached_tokens
    whole.finish_reason, whole.stop_token, whole.error = output.finish_reason, output.stop_token, output.error
