"""Inputs that a model's own layers see, and `serve --verify`: the loaded runners, checked before they serve.

While a model loads, the runners of the layers to check are wrapped (`Watched`), so that the weights they were
prepared from are at hand afterwards. One forward over a short text then shows what each is given. Ranks run
that forward together; after it each checks its own slice of the experts, and no rank waits for another.

Legend: T tokens, N tokens of a prompt, H hidden.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.engine.engine_plan import EnginePlan
from turnout.engine.step.near_ties import WholeAttention
from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError
from turnout.formats.experts import ExpertWeights
from turnout.models.interface import Model, Step
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.interface import Experts
from turnout.moe.plan import MoEPlan
from turnout.moe.runner_by_batch_size import make_runner
from turnout.moe.spec import MoESpec
from turnout.moe.verify import TOKENS, Inputs, Oracle, Result, caught, examine, make_batches
from turnout.vocabulary import Format, Layout, WeightStorage

SENTENCES = (
    "The harbour lay quiet under a thin fog, and only the gulls seemed to be awake.",
    "Maria buys 3 boxes of 12 eggs and breaks 5 of them on the way home, so 31 are left.",
    "def area(width: float, height: float) -> float: return width * height",
    "Water boils at 100 degrees Celsius at sea level, but at a lower temperature in the mountains.",
    "If the train leaves at 9:45 and the journey takes two hours and a half, it arrives at 12:15.",
    "Le petit chat dort sur le fauteuil pendant que la pluie tombe dehors.",
    "In 1969 two people walked on the Moon while a third one waited in orbit.",
    '{"name": "Ada", "languages": ["English", "French"], "born": 1815}',
    "Whoever reads slowly reads twice, my grandmother used to say, and then she would laugh.",
    "A cell has a membrane, which lets some molecules pass and keeps others out.",
    "Das Brot ist noch warm, also warten wir besser, bevor wir es schneiden.",
    "The committee met on Tuesday, synced on nothing, and decided to meet again on Thursday.",
)
ROWS = 512  # tokens of text that are run at most; where more are wanted, their inputs are repeated
CPU_TOKENS = 256  # the largest batch that is checked on a CPU, where an oracle's sum takes time
QUICK_ROWS = 64  # the same where seconds count
STEP_TOKENS = 256  # tokens of one forward
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


class Watched:
    """A runner, the weights it was given, and, while `watching`, the tokens it is given.

    `forget` lets go of both, after which it only passes calls on.
    """

    def __init__(self, runner: Any, spec: MoESpec, plan: MoEPlan) -> None:
        self.runner, self._spec, self._plan = runner, spec, plan
        self.experts: ExpertWeights | None = None
        self.watching = False
        self._seen: list[Inputs] = []

    def prepare(self, experts: ExpertWeights) -> None:
        self.experts = experts
        self.runner.prepare(experts)

    def update(self, experts: ExpertWeights) -> None:
        self.runner.update(experts)

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        if self.watching:
            seen = caught(batch, self._plan.first_expert, self._spec.top_k)
            self._seen.append(seen.to(torch.device("cpu"), seen.x_TH.dtype))
        return self.runner(batch)

    def inputs(self) -> Inputs:
        """Tokens seen while watching, on the CPU; if no token came by, some that are drawn."""
        held = range(self._plan.first_expert, self._plan.first_expert + self._plan.num_local_experts)
        seen = [inputs for inputs in self._seen if len(inputs)]
        if not seen:
            seen = [_drawn(self._spec, held)]
        return Inputs(
            x_TH=torch.cat([inputs.x_TH for inputs in seen]),
            ids_TK=torch.cat([inputs.ids_TK for inputs in seen]),
            weights_TK=torch.cat([inputs.weights_TK for inputs in seen]),
        )

    def forget(self) -> None:
        self.experts, self.watching, self._seen = None, False, []


class Watch:
    """The runners of a model to be loaded, those of some layers watched."""

    def __init__(self, engine_plan: EnginePlan, layers: Sequence[int], device: torch.device) -> None:
        self._spec, self._plan, self._device = engine_plan.description.moe, engine_plan.plan, device
        self._layers, self._dp_size = layers, engine_plan.topology.dp_size
        self._most = min(STEP_TOKENS, engine_plan.budget.local)
        self.watched: dict[int, Watched] = {}

    def make_runner(self, layer: int) -> Experts:
        """What `load_model` calls for each MoE layer."""
        runner = make_runner(self._spec, self._plan, self._device)
        if layer not in self._layers:
            return runner
        self.watched[layer] = Watched(runner, self._spec, self._plan)
        return self.watched[layer]

    def look(self, model: Model, prompts: Sequence[Sequence[int]]) -> None:
        """Run `prompts` through the model, watching; collective among the ranks that share the model."""
        for watched in self.watched.values():
            watched.watching = True
        for ids in prompts:
            forward(model, ids, self._device, most=self._most, dp_size=self._dp_size)
        for watched in self.watched.values():
            watched.watching = False


@torch.inference_mode()
def forward(
    model: Model, ids: Sequence[int], device: torch.device, *, most: int = STEP_TOKENS, dp_size: int = 1
) -> Tensor:
    """Final hidden states [N, H] of one sequence, which every data-parallel rank brings, `most` at a time."""
    ids_N = torch.tensor(ids, dtype=torch.int64, device=device)
    positions_N = torch.arange(len(ids_N), device=device)
    attention = WholeAttention(model.shape.num_layers)
    steps = zip(ids_N.split(most), positions_N.split(most), strict=True)
    return torch.cat(
        [
            model.forward(
                Step(input_ids=ids, positions=at, attention=attention, tokens=(len(ids),) * dp_size)
            )
            for ids, at in steps
        ]
    )


def prompts(engine_plan: EnginePlan, tokens: int, seed: int) -> tuple[list[list[int]], str]:
    """Prompts of at least `tokens` tokens in all, as token ids, and what they are, for people.

    Some text where the model has a tokenizer, else tokens drawn from its vocabulary.
    """
    longest = min(engine_plan.max_context, ROWS)
    draw = random.Random(seed)
    try:
        tokenizer = Tokenizer.load(engine_plan.folder, trust_remote_code=engine_plan.config.trust_remote_code)
    except UserError:
        vocab_size = engine_plan.description.shape.vocab_size
        drawn = [draw.randrange(vocab_size) for _ in range(tokens)]
        return [drawn[at : at + longest] for at in range(0, tokens, longest)], "random tokens"
    found: list[list[int]] = []
    while sum(map(len, found)) < tokens:
        text = " ".join(draw.sample(SENTENCES, len(SENTENCES)))
        found.append(tokenizer.encode(text)[:longest])
    return found, "text"


class SelfCheck:
    """`serve --verify`: the runners of this rank's model, as they will serve, with the weights they hold."""

    def __init__(self, engine_plan: EnginePlan, extent: str, device: torch.device) -> None:
        """extent: "quick", the first and the last MoE layer in small batches, or "full", all of them in
        batches up to the budget's maximum. Raises UserError for what cannot be checked."""
        self._engine_plan, self._extent, self._device = engine_plan, extent, device
        capability = RUNNERS[engine_plan.plan.prefill.runner]
        if "tokens" not in capability.layouts:
            raise UserError(
                f"--verify {extent}: runner {capability.name} takes tokens from its dispatcher alone; "
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
        spec, plan = engine_plan.description.moe, engine_plan.plan
        most = TOKENS[-1] if self._extent == "quick" else largest(plan, self._device)
        inputs = watched.inputs().to(self._device, getattr(torch, plan.compute_dtype))
        batches = make_batches(inputs, plan, min(most, largest(plan, self._device)))

        def run(inputs: Inputs) -> Tensor:
            return runner(
                TokensBatch(
                    hidden=Hidden(data=inputs.x_TH), topk_ids=inputs.ids_TK, topk_weights=inputs.weights_TK
                )
            )

        direct = dataclasses.replace(
            plan,
            prefill=dataclasses.replace(plan.prefill, layout=Layout.TOKENS, wire_format=Format.BF16),
            decode=dataclasses.replace(plan.decode, layout=Layout.TOKENS, wire_format=Format.BF16),
        )
        references = Oracle(spec, experts, batches, self._device)(direct)
        captures = self._device.type == "cuda" and runner.capability.graph_safe
        found = examine(run, runner, direct, batches, references, captures=captures)
        return Checked.of(layer, plan, found, exchanged=False)


def largest(plan: MoEPlan, device: torch.device) -> int:
    """Tokens of the largest batch to check."""
    most = max(plan.prefill.max_tokens, plan.decode.max_tokens)
    return min(most, CPU_TOKENS) if device.type == "cpu" else most


def _drawn(spec: MoESpec, held: Sequence[int]) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    tokens, k = TOKENS[-1], min(spec.top_k, len(held))
    chance_TE = torch.rand(tokens, len(held), generator=draw)
    weights_TK, ids_TK = torch.zeros(tokens, spec.top_k), torch.full((tokens, spec.top_k), -1)
    ids_TK[:, :k] = chance_TE.topk(k).indices + held[0]
    weights_TK[:, :k] = 1 / spec.top_k
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
    return Inputs(x_TH=x_TH, ids_TK=ids_TK.int(), weights_TK=weights_TK)
