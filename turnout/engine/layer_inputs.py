"""What a model's own layers see while it reads some text: inputs of its runners, and the weights they hold.

While a model loads, the runners of the layers to look at are wrapped (`Watched`), so that the weights they
were prepared from are at hand afterwards. Forwards over a short text then show what each is given. Ranks run
them together.

Legend: T tokens, N tokens of a prompt, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.checkpoint import open_checkpoint
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.step.near_ties import WholeAttention
from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError
from turnout.formats.experts import ExpertWeights
from turnout.models import load_model
from turnout.models.interface import Model, ProgressFn, Step
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.interface import Experts
from turnout.moe.plan import MoEPlan
from turnout.moe.runner_by_batch_size import make_runner
from turnout.moe.spec import MoESpec
from turnout.moe.verify import TOKENS, Inputs, caught
from turnout.parallel.groups import SINGLE_RANK

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
    "The committee met on Tuesday, agreed on nothing, and decided to meet again on Thursday.",
)
ROWS = 512  # tokens of text that are run at most; where more are wanted, their inputs are repeated
CPU_TOKENS = 256  # the largest batch that is checked on a CPU, where an oracle's sum takes time
STEP_TOKENS = 256  # tokens of one forward


def load_alone(
    engine_plan: EnginePlan,
    plan: MoEPlan,
    device: torch.device,
    progress: ProgressFn,
    make_runner: Callable[[int], Experts],
) -> Model:
    """The model of `engine_plan` on this rank by itself, its experts by `plan`. make_runner: gives the runner
    of each MoE layer."""
    return load_model(
        open_checkpoint(engine_plan.folder),
        plan,
        groups=SINGLE_RANK,
        device=device,
        dtype=getattr(torch, plan.compute_dtype),
        progress=progress,
        make_runner=make_runner,
    )


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
        return Inputs.joined(seen)

    def forget(self) -> None:
        self.experts, self.watching, self._seen = None, False, []


class Watch:
    """The runners of a model to be loaded, those of some layers watched."""

    def __init__(self, engine_plan: EnginePlan, layers: Sequence[int], device: torch.device) -> None:
        self._engine_plan, self._device = engine_plan, device
        self._layers, self._dp_size = layers, engine_plan.topology.dp_size
        self._most = min(STEP_TOKENS, engine_plan.budget.local)
        self.watched: dict[int, Watched] = {}

    def make_runner(self, layer: int) -> Experts:
        """What `load_model` calls for each MoE layer."""
        spec, plan = self._engine_plan.experts_of(layer)
        runner = make_runner(spec, plan, self._device)
        if layer not in self._layers:
            return runner
        self.watched[layer] = Watched(runner, spec, plan)
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
    attention = WholeAttention(model.shape.attention)
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
