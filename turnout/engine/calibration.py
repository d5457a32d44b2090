"""Activation scales for a checkpoint to be quantised: the largest inputs that each expert's GEMMs see.

W4A4 rounds the input of both expert GEMMs to NVFP4 with a scale that the checkpoint carries. What must be
known is the largest magnitude each expert sees. The model runs as it would be served, prompt after prompt
and no token sampled, with `Recorder` in the place of each layer's runner.

Legend: T tokens, H hidden, M tokens of one expert, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnout.checkpoint.quantize import Calibration, InputAmax
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import resolve
from turnout.engine.layer_inputs import load_alone
from turnout.engine.messages import AddRequest
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError
from turnout.formats.experts import ExpertWeights
from turnout.models.interface import ProgressFn
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.reference import activate
from turnout.moe.spec import Activation

Sample = str | Sequence[Mapping[str, Any]]  # a text, or the messages of a conversation


def calibrate(model: str, samples: Sequence[Sample], progress: ProgressFn) -> Calibration:
    """The largest inputs of both GEMMs for every expert, such as `model.layers.0.mlp.experts.3`.

    Raises UserError for a model that cannot run here, and if there is nothing to run it on.
    """
    try:
        engine_plan = resolve(Config(model=model))
        tokenizer = Tokenizer.load(engine_plan.folder)
    except UserError as error:
        raise UserError(f"calibration runs the model (--no-calibrate does without): {error}") from None
    encoded = [_encode(sample, tokenizer)[: engine_plan.max_context] for sample in samples]
    prompts = [ids for ids in encoded if ids]
    if not prompts:
        raise UserError("there is no text to calibrate with; give some, or quantise with --no-calibrate")
    description, device = engine_plan.description, torch.device(engine_plan.hardware.device)
    recorders = {i: Recorder(description.moe.activation, device) for i in description.moe_layers}
    loaded = load_alone(engine_plan, engine_plan.plan, device, progress, recorders.__getitem__)
    _read_all(build_engine(engine_plan, model=loaded), prompts, progress)
    return {
        f"{description.experts_prefix.format(i)}.{expert}": amax
        for i, recorder in recorders.items()
        for expert, amax in enumerate(recorder.amax())
    }


class Recorder:
    """Runs the experts of one layer in float32, one by one, and keeps the largest inputs of their GEMMs."""

    def __init__(self, activation: Activation, device: torch.device) -> None:
        self._activation, self._device = activation, device

    def prepare(self, experts: ExpertWeights) -> None:
        self._w13, self._w2 = (w.to(self._device) for w in (experts.w13, experts.w2))
        self._seen_13E, self._seen_2E = torch.zeros(2, experts.num_local_experts, device=self._device)

    update = prepare

    def amax(self) -> list[InputAmax]:
        """By expert; 0 where no token came."""
        seen = zip(self._seen_13E.tolist(), self._seen_2E.tolist(), strict=True)
        return [InputAmax(*pair) for pair in seen]

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch), "one rank dispatches nothing"
        x_TH, ids_TK = batch.hidden.data, batch.topk_ids
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        for expert in ids_TK.unique().tolist():
            token_M, slot_M = (ids_TK == expert).nonzero(as_tuple=True)
            y_MH = self._expert(expert, x_TH[token_M].float())
            out_TH.index_add_(0, token_M, y_MH * batch.topk_weights[token_M, slot_M, None])
        return out_TH.to(x_TH.dtype)

    def _expert(self, expert: int, x_MH: Tensor) -> Tensor:
        a_MI = activate(x_MH @ self._w13[expert].decode().T, self._activation)
        for seen_E, inputs in ((self._seen_13E, x_MH), (self._seen_2E, a_MI)):
            seen_E[expert] = torch.maximum(seen_E[expert], inputs.abs().max())
        return a_MI @ self._w2[expert].decode().T


def _encode(sample: Sample, tokenizer: Tokenizer) -> list[int]:
    """Token ids; those of a conversation by the chat template where there is one."""
    if isinstance(sample, str):
        return tokenizer.encode(sample)
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(sample, add_generation_prompt=False)
    return tokenizer.encode("\n".join(str(message["content"]) for message in sample))


def _read_all(core: EngineCore, prompts: Sequence[list[int]], progress: ProgressFn) -> None:
    """Run every prompt through the model, many to a step."""
    for i, ids in enumerate(prompts):
        core.add(AddRequest(id=str(i), prompt_ids=ids, sampling=SamplingParams(max_tokens=0)))
    done = 0
    while core.has_work():
        done += len(core.step())
        progress("calibrating", done, len(prompts))
