"""Loading a folder and running it with the plainest attention there is.

Legend: T tokens of a chunk, L context, Hq/Hkv query/KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.indexing import Index
from turnout.attention.interface import Attention
from turnout.attention.kinds import AttentionSpec, CompressedSpec, SparseLatentSpec
from turnout.attention.up_projection import UpProjection
from turnout.checkpoint import files, open_checkpoint
from turnout.models import describe, load_model
from turnout.models.interface import Model, ProgressFn, Step
from turnout.models.shared_weights import SharedWeights
from turnout.moe.budget import Budget
from turnout.moe.plan import MoEPlan, PlanRequest, plan
from turnout.parallel.groups import SINGLE_RANK, Groups
from turnout.parallel.hardware import detect
from turnout.parallel.topology import Topology


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item more for each range of bytes that checkpoints' files are read at from now on."""
    counted: list[int] = []
    fill = files._fill
    monkeypatch.setattr(files, "_fill", lambda *given: counted.append(1) or fill(*given))
    return counted


def plan_for(config: dict, dtype: str, device: str, topology: Topology, **options: str) -> MoEPlan:
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
        request=PlanRequest(**options),
        compute_dtype=dtype,
    )


def no_layer_is_read(what: str, done: int, total: int) -> None:
    """A `progress` that fails once weights are read."""
    raise AssertionError(f"{what}: {done} of {total}")


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: ProgressFn | None = None,
    groups: Groups = SINGLE_RANK,
    device: str = "cpu",
    shared: SharedWeights | None = None,
    *,
    index_fp8: bool = False,
    **options: str,
) -> Model:
    checkpoint = open_checkpoint(folder)
    name = str(dtype).removeprefix("torch.")
    moe_plan = plan_for(checkpoint.config, name, device, groups.topology, **options)
    return load_model(
        checkpoint,
        moe_plan,
        groups=groups,
        device=device,
        dtype=dtype,
        progress=progress,
        shared=shared,
        index_fp8=index_fp8,
    )


class PlainAttention(Attention):
    """Every sequence's keys and values in a list; softmax(scale q k) v of what a layer sees, written out."""

    def __init__(self, model: Model, device: str = "cpu"):
        self.model, self.device = model, device
        self.cache: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        self.states: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self.lengths: dict[str, int] = {}
        self.entries: dict[tuple[int, str], list[list[Tensor]]] = {}  # and their index keys
        self.index_keys: dict[tuple[int, str], list[Tensor]] = {}
        self.choices: dict[str, list[set[int]]] = {}  # of each token of this step, by the last indexer

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

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        counts = [count for _, count in self._chunks]
        parts = []
        for (name, _), *qkv in zip(
            self._chunks, *(x.split(counts) for x in (q_NHD, k_NHD, v_NHD)), strict=True
        ):
            past = self.cache.setdefault((layer, name), [])
            spec = self.model.shape.attention[layer]
            chosen = self.choices[name] if isinstance(spec, SparseLatentSpec) else None
            parts.append(self._attend(spec, past, *qkv, sinks_H, chosen))
        return torch.cat(parts)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        """Keys and values of every head, made once, by the weights' definition."""
        if index is not None:
            self._choose(layer, index)
        nope, rank = up.nope_dim, up.weight_HXL.shape[-1]
        made_NHX = torch.einsum("hxl,nl->nhx", up.weight_HXL, latent_NC[:, :rank])
        rope_NHR = latent_NC[:, None, rank:].expand(-1, q_NHD.shape[1], -1)
        return self(layer, q_NHD, torch.cat((made_NHX[..., :nope], rope_NHR), dim=-1), made_NHX[..., nope:])

    def _choose(self, layer: int, index: Index) -> None:
        """Token by token, in float64: places sorted by falling score, then by place."""
        topk, at = self.model.shape.attention[layer].index_topk, 0
        for name, count in self._chunks:
            keys = self.index_keys.setdefault((layer, name), [])
            self.choices[name] = []
            for n in range(at, at + count):
                keys.append(index.key_ND[n].double())
                products_LH = torch.stack(keys) @ index.q_NHD[n].double().T
                scores = (products_LH.clamp(min=0) @ index.weights_NH[n].double()).tolist()
                self.choices[name].append(set(sorted(range(len(scores)), key=lambda i: -scores[i])[:topk]))
            at += count

    def _attend(
        self,
        spec: AttentionSpec,
        past: list,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        chosen: list[set[int]] | None,
    ) -> Tensor:
        past.append((k_THD, v_THD))
        group = spec.num_heads // k_THD.shape[1]
        k_LHD, v_LHD = (torch.cat(x).repeat_interleave(group, dim=1) for x in zip(*past, strict=True))
        T, L = len(q_THD), len(k_LHD)
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * spec.scale
        ages_TL = torch.arange(L - T, L)[:, None] - torch.arange(L)
        hidden_TL = ((ages_TL < 0) | (ages_TL >= (spec.window or L))).to(self.device)
        for t, places in enumerate(chosen or ()):
            hidden_TL[t, sorted(set(range(L)) - places)] = True
        scores_HTL = scores_HTL.masked_fill(hidden_TL, float("-inf")).float()
        if sinks_H is not None:
            scores_HTL = torch.cat((scores_HTL, sinks_H[:, None, None].expand(-1, T, 1)), dim=-1)
        weights_HTL = scores_HTL.softmax(-1)[..., :L].to(v_LHD)
        return torch.einsum("htl,lhd->thd", weights_HTL, v_LHD)

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        """Token by token, from all that came before; entries are made window by window."""
        spec, at, parts = self.model.shape.attention[layer], 0, [q_NHD[:0]]
        for name, count in self._chunks:
            past = self.cache.setdefault((layer, name), [])
            for n in range(at, at + count):
                past.append((kv_ND[n], None if rest is None else rest.raw_NX[n]))
                keys = [kv for kv, _ in past[-spec.recent :]]
                if rest is not None:
                    made = self.entries.setdefault((layer, name), [])
                    if len(past) % spec.rate == 0:
                        made.append(self._entry(spec, [raw for _, raw in past], rest))
                    keys += self._seen(spec, made, rest, n)
                scores_HL = q_NHD[n] @ torch.stack(keys).T * spec.scale
                weights_HL = torch.cat((scores_HL, sinks_H[:, None]), dim=1).softmax(-1)[:, :-1]
                parts.append((weights_HL @ torch.stack(keys))[None])
            at += count
        return torch.cat(parts)

    def _seen(
        self, spec: CompressedSpec, made: list[list[Tensor]], rest: Compressible, n: int
    ) -> list[Tensor]:
        """Those of the entries that token `n` of this step sees."""
        if rest.index_entries is None or len(made) <= spec.index_topk:
            return [entry_D for entry_D, *_ in made]
        scores = [
            float((rest.index_queries[n] @ key_D).clamp(min=0) @ rest.index_weights[n]) for _, key_D in made
        ]
        best = sorted(range(len(made)), key=lambda w: -scores[w])[: spec.index_topk]
        return [made[w][0] for w in best]

    def _entry(self, spec: CompressedSpec, raw: list[Tensor], rest: Compressible) -> list[Tensor]:
        """What is made of the last window of `raw`, and where there is an index its key."""
        made = [self._made(spec, raw, rest.entries, 0)]
        if rest.index_entries is not None:
            made.append(self._made(spec, raw, rest.index_entries, 2 * spec.series * spec.head_dim))
        return made

    def _made(self, spec: CompressedSpec, raw: list[Tensor], by: Compressor, at: int) -> Tensor:
        rate, size, w = spec.rate, by.bias_RX.shape[1], len(raw) // spec.rate - 1
        D, contents, gates = size // spec.series, [], []
        for t in range(max(0, (w - spec.overlap) * rate), (w + 1) * rate):
            series = slice(size - D, size) if t >= w * rate else slice(0, D)
            contents.append(raw[t][at : at + size][series])
            gates.append((raw[t][at + size : at + 2 * size] + by.bias_RX[t % rate])[series])
        mixed_D = (torch.stack(contents) * torch.stack(gates).softmax(0)).sum(0)
        return by.turn(by.norm(mixed_D[None]), torch.tensor([w * rate]))[0]

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        """Gated DeltaNet by its definition: token by token, head by head."""
        counts = [count for _, count in self._chunks]
        parts = [mixed_NX.new_empty(0, cell.spec.num_heads * cell.spec.value_dim)]
        for (name, _), mixed_TX in zip(self._chunks, mixed_NX.split(counts), strict=True):
            for mixed_X in mixed_TX:
                parts.append(self._recur_once((layer, name), mixed_X, cell)[None])
        return torch.cat(parts)

    def _recur_once(self, key: tuple[int, str], mixed_X: Tensor, cell: DeltaCell) -> Tensor:
        spec = cell.spec
        Hk, Hv, Dk, Dv = spec.num_kv_heads, spec.num_heads, spec.head_dim, spec.value_dim
        qkv, z, b, a = mixed_X.split([2 * Hk * Dk + Hv * Dv, Hv * Dv, Hv, Hv])
        window, state = self.states.get(
            key, (qkv.new_zeros(len(qkv), len(cell.conv_WC)), torch.zeros(Hv, Dk, Dv, device=qkv.device))
        )
        window = torch.cat((window[:, 1:], qkv[:, None]), dim=1)
        q, k, v = F.silu((window * cell.conv_WC.T).sum(1).float()).split([Hk * Dk, Hk * Dk, Hv * Dv])
        state, out = state.clone(), []
        for h in range(Hv):
            of_key = slice(h // (Hv // Hk) * Dk, (h // (Hv // Hk) + 1) * Dk)
            q_D, k_D = (x[of_key] / (x[of_key].square().sum() + 1e-6).sqrt() for x in (q, k))
            decayed = state[h] * (cell.decay_H[h] * F.softplus(a[h].float() + cell.bias_H[h])).exp()
            d = b[h].float().sigmoid() * (v[h * Dv : (h + 1) * Dv] - k_D @ decayed)
            state[h] = decayed + torch.outer(k_D, d)
            o = q_D @ state[h] / Dk**0.5
            out.append(o / (o.square().mean() + cell.eps).sqrt() * cell.norm_D)
        self.states[key] = window, state
        return (torch.cat(out) * F.silu(z.float())).to(mixed_X)
