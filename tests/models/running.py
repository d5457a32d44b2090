"""Loading a folder and running it with the plainest attention there is.

Legend: T tokens of a chunk, L context, Hq/Hkv query/KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from turnout.checkpoint import open_checkpoint
from turnout.models import describe, load_model
from turnout.models.interface import Model, ProgressFn, Step
from turnout.moe.budget import Budget
from turnout.moe.plan import MoEPlan, Wishes, plan
from turnout.parallel.groups import SINGLE_RANK, Groups
from turnout.parallel.hardware import detect
from turnout.parallel.topology import Topology


def plan_for(config: dict, dtype: str, device: str, topology: Topology, **wishes: str) -> MoEPlan:
    return plan(
        describe(config).moe,
        topology=topology,
        budget=Budget.from_limits(
            chunked_prefill_size=512,
            max_prefill_tokens=512,
            max_running_requests=16,
            dp_size=topology.dp_size,
        ),
        hardware=detect(device),
        request=Wishes(**wishes),
        compute_dtype=dtype,
    )


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: ProgressFn | None = None,
    groups: Groups = SINGLE_RANK,
    device: str = "cpu",
    **wishes: str,
) -> Model:
    checkpoint = open_checkpoint(folder)
    name = str(dtype).removeprefix("torch.")
    moe_plan = plan_for(checkpoint.config, name, device, groups.topology, **wishes)
    return load_model(checkpoint, moe_plan, groups=groups, device=device, dtype=dtype, progress=progress)


class PlainAttention:
    """Every sequence's keys and values in a list; softmax(q k / sqrt(D)) v, written out."""

    def __init__(self, model: Model, device: str = "cpu"):
        shape = model.shape
        self.model, self.groups, self.device = model, shape.num_heads // shape.num_kv_heads, device
        self.cache: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def logits(
        self,
        *chunks: tuple[str, Sequence[int]],
        phase: str = "prefill",
        tokens: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """One step that appends tokens to sequences by name; float32 [T, V] for each.

        tokens: those of every data-parallel rank, where there are several.
        """
        self._chunks = [(name, len(ids)) for name, ids in chunks]
        starts = [self.lengths.get(name, 0) for name, _ in chunks]
        self.lengths |= {name: start + len(ids) for (name, ids), start in zip(chunks, starts, strict=True)}
        step = Step(
            input_ids=torch.tensor([i for _, ids in chunks for i in ids], dtype=torch.int64).to(self.device),
            positions=torch.cat(
                [torch.arange(s, s + len(ids)) for s, (_, ids) in zip(starts, chunks, strict=True)]
            ).to(self.device),
            attention=self,
            phase=phase,
            tokens=tokens,
        )
        hidden = self.model.forward(step)
        return list(self.model.logits(hidden).cpu().split([len(ids) for _, ids in chunks]))

    def __call__(self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> Tensor:
        counts = [count for _, count in self._chunks]
        parts = []
        for (name, _), *qkv in zip(
            self._chunks, *(x.split(counts) for x in (q_NHD, k_NHD, v_NHD)), strict=True
        ):
            parts.append(self._attend(self.cache.setdefault((layer, name), []), *qkv))
        return torch.cat(parts)

    def _attend(self, past: list, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        past.append((k_THD, v_THD))
        k_LHD, v_LHD = (torch.cat(x).repeat_interleave(self.groups, dim=1) for x in zip(*past, strict=True))
        T, L, D = len(q_THD), len(k_LHD), q_THD.shape[-1]
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) / D**0.5
        later_TL = (torch.arange(L) > torch.arange(L - T, L)[:, None]).to(self.device)
        weights_HTL = scores_HTL.masked_fill(later_TL, float("-inf")).float().softmax(-1).to(v_LHD)
        return torch.einsum("htl,lhd->thd", weights_HTL, v_LHD)
