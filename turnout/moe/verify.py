"""Does a plan's runner behind its dispatcher do what is promised, on this device, with these weights?

A layer's weights and some of its real inputs are run through dispatch -> experts -> combine in one process,
in batches of every kind that serving meets, and compared with the oracle (reference.py) under the bounds of
accuracy.py. What a backend declares beyond that is held against it: the same bits when a batch is repeated,
from a CUDA graph as without one, and for a token in any batch (`same_bits`).

A backend that raises is a finding like any other, so that one broken backend hides nothing about the rest.

Legend: T tokens, H hidden, k top-k, E experts of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.formats import fp8, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.moe.accuracy import BOUNDS, ONE_TOKEN, relative_error
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.interface import Runner
from turnout.moe.layer import input_scale_of, make_dispatchers
from turnout.moe.plan import MoEPlan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import SINGLE_RANK
from turnout.vocabulary import Format, Layout, Phase

TOKENS = (0, 1, 3, 17)  # and as many as the budget or the caller allows
BUCKETS = (64, 256, 1024, 4096)  # more on a GPU, whose kernels are others for other numbers of tokens
CAPTURED = (1, 17, 256)  # tokens of the batches that are tried in CUDA graphs


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens of a layer and what its router chose for them."""

    x_TH: Tensor
    ids_TK: Tensor  # int32, global
    weights_TK: Tensor  # float32

    def __len__(self) -> int:
        return len(self.x_TH)

    def __getitem__(self, rows: slice | Tensor) -> Inputs:
        return Inputs(x_TH=self.x_TH[rows], ids_TK=self.ids_TK[rows], weights_TK=self.weights_TK[rows])

    def to(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        return Inputs(
            x_TH=self.x_TH.to(device, dtype),
            ids_TK=self.ids_TK.to(device),
            weights_TK=self.weights_TK.to(device),
        )

    def repeated(self, tokens: int, start: int = 0) -> Inputs:
        """So many of them, from `start` on, over and over."""
        return self[(torch.arange(tokens, device=self.x_TH.device) + start) % len(self)]

    @property
    def batch(self) -> TokensBatch:
        """As a runner takes them."""
        return TokensBatch(hidden=Hidden(data=self.x_TH), topk_ids=self.ids_TK, topk_weights=self.weights_TK)

    @classmethod
    def joined(cls, parts: Sequence[Inputs]) -> Inputs:
        """One after the other; at least one part."""
        return cls(
            x_TH=torch.cat([part.x_TH for part in parts]),
            ids_TK=torch.cat([part.ids_TK for part in parts]),
            weights_TK=torch.cat([part.weights_TK for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`prefix`: the first tokens of one sequence that all such batches share."""

    name: str
    inputs: Inputs
    prefix: bool = False
    one_expert_each: bool = False  # token i goes to local expert i only


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one batch showed. None: not promised, or cannot be tried here."""

    batch: str
    tokens: int
    bound: float
    error: float | None = None
    repeats: bool | None = None
    replays: bool | None = None  # a CUDA graph gives what running eagerly does
    independent: bool | None = None  # of the rest of the batch
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem


Run = Callable[[Inputs], Tensor]


class Pipeline:
    """dispatch -> experts -> combine in one process. The dispatcher is that of the phase a batch is of."""

    def __init__(
        self, spec: MoESpec, plan: MoEPlan, experts: ExpertWeights, device: torch.device, runner: Runner
    ) -> None:
        """runner: prepared with `experts`."""
        self._runner, self._decode = runner, plan.decode.max_tokens
        input_scale = input_scale_of(experts, device)
        self._dispatchers = make_dispatchers(spec, plan, SINGLE_RANK, device, input_scale)
        self.graph_safe = runner.capability.graph_safe and all(
            dispatcher.capability.graph_safe for dispatcher in self._dispatchers.values()
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        dispatcher = self._dispatchers[Phase.DECODE if len(inputs) <= self._decode else Phase.PREFILL]
        batch, state = dispatcher.dispatch(inputs.x_TH, inputs.ids_TK, inputs.weights_TK, (len(inputs),))
        return dispatcher.combine(self._runner(batch), state)


class Oracle:
    """What batches of one layer should give, computed once for each kind of numerics."""

    def __init__(
        self, spec: MoESpec, experts: ExpertWeights, batches: Sequence[Batch], device: torch.device
    ) -> None:
        self._activation, self._batches = spec.activation, batches
        self._experts = experts.to(device)
        self._known: dict[tuple[Format, Format], list[Tensor]] = {}

    def __call__(self, plan: MoEPlan) -> list[Tensor]:
        """float32 [T, H] for every batch."""
        key = plan.activation_format, plan.prefill.wire_format
        if key not in self._known:
            self._known[key] = self._compute(*key)
        return self._known[key]

    def _compute(self, activation_format: Format, wire_format: Format) -> list[Tensor]:
        every = Inputs.joined([batch.inputs for batch in self._batches])
        out_TH = experts_reference(
            as_sent(every.x_TH, self._experts, wire_format),
            every.ids_TK,
            every.weights_TK,
            self._experts,
            self._activation,
            activation_format=activation_format,
        )
        return list(out_TH.split([len(batch.inputs) for batch in self._batches]))


def as_sent(x_TH: Tensor, experts: ExpertWeights, wire_format: Format) -> Tensor:
    """What experts get of tokens that are dispatched in `wire_format`."""
    if wire_format == Format.FP8:
        return fp8.decode_activation(*fp8.encode_activation(x_TH))
    if wire_format == Format.BF16:
        return x_TH
    assert experts.input_scales is not None, "nvfp4 on the wire needs the checkpoint's input scales"
    return nvfp4.fake_quantize(x_TH, experts.input_scales.w13.max())


def make_batches(inputs: Inputs, plan: MoEPlan, most: int) -> list[Batch]:
    """Batches of 0 to `most` tokens, all tokens at one expert, each expert once, and nothing but padding.

    inputs: at least one token; they are repeated where more are wanted.
    """
    sizes = TOKENS + BUCKETS if inputs.x_TH.device.type == "cuda" else TOKENS
    found = [
        Batch(name=str(tokens), inputs=inputs.repeated(tokens), prefix=True)
        for tokens in sorted({n for n in sizes if n < most} | {most})
    ]
    last = plan.first_expert + plan.num_local_experts - 1
    found.append(Batch(name="one expert", inputs=_only(inputs.repeated(most), [last] * most)))
    held = range(plan.first_expert, plan.first_expert + plan.num_local_experts)
    for start in range(0, len(held), most):
        some = held[start : start + most]
        name = "each expert" if len(held) <= most else f"experts {some[0]}..{some[-1]}"
        each = _only(inputs.repeated(len(some)), list(some))
        found.append(Batch(name=name, inputs=each, one_expert_each=True))
    few = inputs.repeated(min(17, most))
    nothing = torch.full_like(few.x_TH, torch.nan)
    padding = replace(_only(few, [-1] * len(few)), x_TH=nothing)  # of weight 0
    return [*found, Batch(name="padding", inputs=padding)]


def verify(
    spec: MoESpec,
    plan: MoEPlan,
    experts: ExpertWeights,
    batches: Sequence[Batch],
    oracle: Oracle,
    device: torch.device,
) -> list[Result]:
    """One result per batch, for the plan's runner with its own copy of `experts`."""
    bound = BOUNDS[plan.activation_format, plan.compute_dtype]
    try:
        runner = RUNNERS.load(plan.prefill.runner)(spec, plan, device)
        runner.prepare(experts)
        pipeline = Pipeline(spec, plan, experts, device, runner)
    except Exception as error:
        problem = f"cannot be built: {_said(error)}"
        return [Result(batch="any", tokens=0, bound=bound, problem=problem)]
    captures = pipeline.graph_safe and device.type == "cuda"
    return examine(pipeline, runner, plan, batches, oracle(plan), captures=captures)


def examine(
    run: Run,
    runner: Runner,
    plan: MoEPlan,
    batches: Sequence[Batch],
    references: Sequence[Tensor],
    *,
    captures: bool = False,
) -> list[Result]:
    """One result per batch; `run` is `runner`, prepared, and whatever brings it its tokens."""
    first = [_attempt(run, batch.inputs) for batch in batches]
    again = [_attempt(run, batch.inputs) for batch in reversed(batches)][::-1]
    results = []
    for batch, y, repeated, ref in zip(batches, first, again, references, strict=True):
        result = Result(
            batch=batch.name,
            tokens=len(batch.inputs),
            bound=BOUNDS[plan.activation_format, plan.compute_dtype],
        )
        if isinstance(y, str) or isinstance(repeated, str):
            results.append(replace(result, problem=y if isinstance(y, str) else f"repeated, {repeated}"))
            continue
        result = _compare(result, batch, y, ref, plan)
        if runner.capability.deterministic:
            result = replace(result, repeats=_same(y, repeated))
        if captures and batch.prefix and len(y) in CAPTURED:
            try:
                result = replace(result, replays=_replays(run, batch.inputs))
            except Exception as error:
                result = replace(result, problem=f"cannot be captured in a CUDA graph: {_said(error)}")
        if batch.prefix and len(y) and plan.decode.layout == Layout.TOKENS:
            result = replace(result, independent=_independent(runner, y, batches, first))
        results.append(_with_broken_promises(result))
    return results


def caught(batch: TokensBatch | ExpertsBatch, first_expert: int, top_k: int) -> Inputs:
    """What a runner was given, as tokens; a row of a local expert is a token that goes to one expert."""
    x = batch.hidden.decode()
    if isinstance(batch, TokensBatch):
        return Inputs(x_TH=x, ids_TK=batch.topk_ids, weights_TK=batch.topk_weights)
    used_EC = torch.arange(x.shape[1], device=x.device) < batch.counts.unsqueeze(1)
    expert_T, row_T = used_EC.nonzero(as_tuple=True)
    chosen = Inputs(
        x_TH=x[expert_T, row_T],
        ids_TK=torch.zeros(len(expert_T), top_k, dtype=torch.int32, device=x.device),
        weights_TK=torch.zeros(len(expert_T), top_k, device=x.device),
    )
    return _only(chosen, (expert_T + first_expert).tolist())


def _compare(result: Result, batch: Batch, y: Tensor, ref: Tensor, plan: MoEPlan) -> Result:
    """`result` with the error, and what is wrong with y against ref."""
    dtype = getattr(torch, plan.compute_dtype)
    if y.shape != ref.shape or y.dtype != dtype:
        problem = f"gives {y.dtype} {list(y.shape)} where {dtype} {list(ref.shape)} is wanted"
        return replace(result, problem=problem)
    unusable = (~ref.isfinite().all(1)).nonzero().flatten().tolist()
    if unusable:
        where = f" of {_experts(batch, unusable)}" if batch.one_expert_each else ""
        problem = f"no runner can be right: weights{where} or inputs hold NaN or infinities"
        return replace(result, problem=problem)
    error = relative_error(y, ref)
    result = replace(result, error=error)
    if batch.one_expert_each:
        errors = [relative_error(*pair) for pair in zip(y, ref, strict=True)]
        wrong = {i: one for i, one in enumerate(errors) if not one <= ONE_TOKEN * result.bound}
        if wrong:
            worst = math.nan if any(map(math.isnan, wrong.values())) else max(wrong.values())
            return replace(result, problem=f"wrong for {_experts(batch, list(wrong))}: error {worst:.1e}")
    if not error <= result.bound:  # which NaN is not
        return replace(result, problem=f"relative error {error:.1e} above {result.bound:.0e}")
    return result


def _with_broken_promises(result: Result) -> Result:
    broken = [
        what
        for kept, what in (
            (result.repeats, "a repeated call gives other bits"),
            (result.replays, "a CUDA graph gives other bits than running eagerly"),
            (result.independent, "a token's bits depend on its batch"),
        )
        if kept is False
    ]
    return replace(result, problem="; ".join([result.problem, *broken]).removeprefix("; "))


def _independent(
    runner: Runner, y: Tensor, batches: Sequence[Batch], outputs: Sequence[Tensor | str]
) -> bool | None:
    """Whether tokens got the same bits in the larger batches for which the runner promises that."""
    promised = runner.same_bits(len(y))
    larger = [
        out[: len(y)]
        for batch, out in zip(batches, outputs, strict=True)
        if batch.prefix and isinstance(out, Tensor) and len(out) > len(y) and len(out) in promised
    ]
    return all(_same(y, out) for out in larger) if larger else None


def _replays(run: Run, inputs: Inputs) -> bool:
    """Whether a graph captured with some inputs gives with others what running eagerly does."""
    others = inputs[torch.arange(len(inputs) - 1, -1, -1, device=inputs.x_TH.device)]
    placed = Inputs(
        x_TH=inputs.x_TH.clone(), ids_TK=inputs.ids_TK.clone(), weights_TK=inputs.weights_TK.clone()
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(placed)
    for given in (others, inputs):
        placed.x_TH.copy_(given.x_TH)
        placed.ids_TK.copy_(given.ids_TK)
        placed.weights_TK.copy_(given.weights_TK)
        graph.replay()
        if not _same(out, run(given)):
            return False
    return True


def _attempt(run: Run, inputs: Inputs) -> Tensor | str:
    """The output, or what was raised."""
    try:
        return run(inputs).clone()
    except Exception as error:
        return _said(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that NaN is what it is."""
    bits = (x.contiguous().view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and torch.equal(*bits)


def _only(inputs: Inputs, experts: Sequence[int]) -> Inputs:
    """Token i at expert i of `experts` only, with weight 1; at none if that is -1."""
    ids_TK = torch.full_like(inputs.ids_TK, -1)
    ids_TK[:, 0] = torch.tensor(experts, dtype=torch.int32)
    return replace(inputs, ids_TK=ids_TK, weights_TK=(ids_TK >= 0).float())


def _experts(batch: Batch, tokens: Sequence[int]) -> str:
    ids = [int(batch.inputs.ids_TK[token, 0]) for token in tokens]
    named = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    return f"expert {named}" if len(ids) == 1 else f"experts {named}"
