"""DeepSeek-V4 in small, for training: the arithmetic of turnout/attention/compressed.py and models/streams.py.

A batch is rows of equal length, each of which begins with a document, as for layers of Gated DeltaNet. The
index, whose choice has no gradient, learns from what attention makes of the entries that it may choose.

T tokens, n rows of R tokens, H hidden, S streams, N heads, D head size, E entries of a row, P tokens that an
entry is made of, L keys: tokens of a row, then its entries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Batch
from .model import Output, Quantization, all_experts, matrix, rope_table, rotate, routed, switch_balance
from .released import Linear, Norm, ReleasedModel, ReleasedShape, Routed, rows_of

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}


@dataclass(frozen=True, kw_only=True)
class StreamShape(ReleasedShape):
    """rates: of each layer, 0: no entries, 4: with overlap and an index. Releases have 128 in place of 16, which
    word problems are too short for."""

    layers: int = 6
    experts: int = 24
    eps: float = 1e-6
    rates: tuple[int, ...] = (0, 4, 16, 4, 16, 4)
    head_dim: int = 32
    query_rank: int = 128
    window: int = 32
    groups: int = 2
    output_rank: int = 64
    index_heads: int = 16
    index_dim: int = 32
    index_topk: int = 16
    hash_layers: int = 2
    streams: int = 4
    iterations: int = 20
    routed_scaling: float = 1.5
    limit: float = 10.0
    long_theta: float = 160_000.0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "compress_rates": {KINDS[rate]: rate for rate in (4, 16)},
            "compress_rope_theta": self.long_theta,
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": self.iterations,
            "head_dim": self.head_dim,
            "index_head_dim": self.index_dim,
            "index_n_heads": self.index_heads,
            "index_topk": self.index_topk,
            "layer_types": [KINDS[rate] for rate in self.rates[: self.layers]],
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_hash_layers": self.hash_layers,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 0,
            "o_groups": self.groups,
            "o_lora_rank": self.output_rank,
            "q_lora_rank": self.query_rank,
            "qk_rope_head_dim": self.rope_dim,
            "routed_scaling_factor": self.routed_scaling,
            "scoring_func": "sqrtsoftplus",
            "sliding_window": self.window,
            "swiglu_limit": self.limit,
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
        }


class Windows(NamedTuple):
    """Of one rate: ends [n, E] where windows end in rows; seen [n, R, E]; tokens [n, E, P] that entries are made
    of and whether they are [n, E, P]; cos_sin [n E, 2, rope_dim] of their positions."""

    ends: Tensor
    seen: Tensor
    tokens: Tensor
    made_of: Tensor
    cos_sin: Tensor


class Context(NamedTuple):
    """What layers know of a batch. ids [T]; recent [n, R, R]: which tokens a token sees; windows: by rate; cos_sin:
    [T, 2, rope_dim], of layers without entries and of those with entries."""

    ids: Tensor
    recent: Tensor
    windows: dict[int, Windows]
    cos_sin: tuple[Tensor, Tensor]


def turned(x: Tensor, cos_sin: Tensor, *, back: bool = False) -> Tensor:
    """x [T, heads, D], its end rotated in pairs of neighbours."""
    if back:
        cos_sin = cos_sin * cos_sin.new_tensor([1, -1])[:, None]
    size = cos_sin.shape[-1]
    halves = x[..., -size:].unflatten(-1, (-1, 2)).mT.flatten(-2)
    pairs = rotate(halves, cos_sin).unflatten(-1, (2, -1)).mT.flatten(-2)
    return torch.cat((x[..., :-size], pairs.to(x.dtype)), dim=-1)


def windows_of(batch: Batch, rows: int, rate: int, rope: Tensor) -> Windows:
    position, start = (x.unflatten(0, (rows, -1)) for x in (batch.position, batch.start))
    R = position.shape[1]
    at = torch.arange(R, device=position.device)
    whole = (position + 1) % rate == 0
    ends = torch.where(whole, at, R + at).sort(dim=1).values[:, : R // rate]  # those that are none lie behind
    real, ends = ends < R, ends.clamp(max=R - 1)
    ended_in, ended_at = start.gather(1, ends), position.gather(1, ends)
    seen = real[:, None] & (ends[:, None] <= at[:, None]) & (ended_in[:, None] == start[..., None])
    back = torch.arange(rate * (2 if rate == 4 else 1), device=position.device).flip(0)
    made_of = ended_at[..., None] - back >= 0
    first = (ended_at + 1 - rate).clamp(min=0).flatten()
    return Windows(ends, seen, (ends[..., None] - back).clamp(min=0), made_of, rope[first])


class Compressor(nn.Module):
    def __init__(self, s: StreamShape, rate: int, size: int):
        super().__init__()
        self.size, self.rate, self.series = size, rate, 2 if rate == 4 else 1
        self.wkv, self.wgate = (Linear(self.series * size, s.hidden) for _ in range(2))
        self.ape = matrix(rate, self.series * size, std=0.02)
        self.norm = Norm(size, s.eps)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """[n, E, D]"""
        rows, E, P = windows.tokens.shape
        at = windows.tokens.flatten(1)[..., None]
        content, gate = (
            y.unflatten(0, (rows, -1)).gather(1, at.expand(-1, -1, y.shape[-1])).unflatten(1, (E, P))
            for y in (self.wkv(x), self.wgate(x))
        )
        gate = gate.float() + self.ape.repeat(self.series, 1)
        if (
            self.series > 1
        ):  # of the window before its own an entry has the first series, of its own the second
            content, gate = (
                torch.cat((y[:, :, : P // 2, : self.size], y[:, :, P // 2 :, self.size :]), dim=2)
                for y in (content, gate)
            )
        gate = gate.masked_fill(~windows.made_of[..., None], -1e9)
        made = self.norm((content * gate.softmax(dim=2).to(content.dtype)).sum(dim=2))
        return turned(made.flatten(0, 1)[:, None], windows.cos_sin).view_as(made)


class Indexer(nn.Module):
    def __init__(self, s: StreamShape):
        super().__init__()
        self.s = s
        self.wq_b = Linear(s.index_heads * s.index_dim, s.query_rank)
        self.weights_proj = Linear(s.index_heads, s.hidden)
        self.compressor = Compressor(s, 4, s.index_dim)

    def forward(self, x: Tensor, q: Tensor, cos_sin: Tensor, windows: Windows) -> Tensor:
        """float32 [n, R, E]: scores, -inf of what is not seen."""
        s, rows = self.s, len(windows.seen)
        q = turned(self.wq_b(q).unflatten(-1, (s.index_heads, -1)), cos_sin).unflatten(0, (rows, -1))
        weights = (
            self.weights_proj(x).float().unflatten(0, (rows, -1)) * (s.index_heads * s.index_dim) ** -0.5
        )
        products = torch.einsum("nrhd,ned->nrhe", q.float(), self.compressor(x, windows).float()).relu()
        return torch.einsum("nrhe,nrh->nre", products, weights).masked_fill(~windows.seen, -torch.inf)


class CompressedAttention(nn.Module):
    def __init__(self, s: StreamShape, rate: int):
        super().__init__()
        self.s, self.rate = s, rate
        self.wq_a = Linear(s.query_rank, s.hidden)
        self.q_norm = Norm(s.query_rank, s.eps)
        self.wq_b = Linear(s.heads * s.head_dim, s.query_rank)
        self.wkv = Linear(s.head_dim, s.hidden)
        self.kv_norm = Norm(s.head_dim, s.eps)
        self.wo_a = Linear(s.groups * s.output_rank, s.heads * s.head_dim // s.groups)
        self.wo_b = Linear(s.hidden, s.groups * s.output_rank, std=0.02)
        self.attn_sink = nn.Parameter(torch.zeros(s.heads))
        if rate:
            self.compressor = Compressor(s, rate, s.head_dim)
        if rate == 4:
            self.indexer = Indexer(s)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """([T, H], the loss of the index)"""
        s, cos_sin = self.s, context.cos_sin[self.rate > 0]
        query = self.q_norm(self.wq_a(x))
        q = self.wq_b(query).unflatten(-1, (s.heads, -1))
        q = turned(F.rms_norm(q.float(), (s.head_dim,), eps=s.eps).to(x.dtype), cos_sin)
        rows, seen, index = len(context.recent), context.recent, None
        keys = turned(self.kv_norm(self.wkv(x))[:, None], cos_sin)[:, 0].unflatten(0, (rows, -1))
        if self.rate:
            windows = context.windows[self.rate]
            keys, visible = torch.cat((keys, self.compressor(x, windows)), dim=1), windows.seen
            if self.rate == 4:
                index = self.indexer(x.detach(), query.detach(), cos_sin, windows)
                best = index.detach().topk(min(s.index_topk, index.shape[-1]), dim=-1).indices
                visible = visible & torch.zeros_like(visible).scatter(-1, best, True)
            seen = torch.cat((seen, visible), dim=-1)
        scores = torch.einsum("nrhd,nld->nhrl", q.unflatten(0, (rows, -1)), keys).float() * s.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        sinks = self.attn_sink[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        out = torch.einsum("nhrl,nld->nrhd", weights.to(keys.dtype), keys).flatten(0, 1)
        groups = turned(out, cos_sin, back=True).reshape(len(x), s.groups, -1).transpose(0, 1)
        up = self.wo_a.weight.to(x.dtype).unflatten(0, (s.groups, -1))
        y = self.wo_b(torch.bmm(groups, up.mT).transpose(0, 1).flatten(1))
        return y, x.new_zeros(()) if index is None else self._index_loss(index, weights)

    def _index_loss(self, index: Tensor, weights: Tensor) -> Tensor:
        """Of the index's distribution over entries [n, R, E], by that of attention [n, N, R, L]."""
        wanted = weights[..., -index.shape[-1] :].sum(dim=1).detach()
        found = index.masked_fill(index.isinf(), -1e9).log_softmax(dim=-1)
        return -(wanted / (wanted.sum(dim=-1, keepdim=True) + 1e-6) * found).sum(dim=-1).mean()


class Gate(nn.Module):
    def __init__(self, s: StreamShape, *, by_id: bool):
        super().__init__()
        self.weight = matrix(s.experts, s.hidden)
        if by_id:
            self.register_buffer(
                "tid2eid", torch.rand(s.vocab, s.experts).argsort(dim=1)[:, : s.top_k].clone()
            )
        else:
            self.register_buffer("bias", torch.zeros(s.experts))


class ClampedMLP(nn.Module):
    def __init__(self, s: StreamShape):
        super().__init__()
        self.limit = s.limit
        self.w1, self.w3 = Linear(s.expert_width, s.hidden), Linear(s.expert_width, s.hidden)
        self.w2 = Linear(s.hidden, s.expert_width, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        return self.w2(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self, s: StreamShape, *, by_id: bool):
        super().__init__()
        self.s, self.gate, self.experts = s, Gate(s, by_id=by_id), nn.Module()
        self.experts.w1 = matrix(s.experts, s.expert_width, s.hidden)
        self.experts.w3 = matrix(s.experts, s.expert_width, s.hidden)
        self.experts.w2 = matrix(s.experts, s.hidden, s.expert_width, std=0.02)
        self.shared_experts = ClampedMLP(s)

    def forward(self, x: Tensor, ids: Tensor, quant: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Routed]:
        s, gate, experts = self.s, self.gate, self.experts
        scores = F.softplus(F.linear(x.float(), gate.weight)).sqrt()
        if hasattr(gate, "tid2eid"):
            choice = torch.zeros_like(scores).scatter(1, gate.tid2eid[ids], 1.0)
        else:
            choice = scores + gate.bias
        weight = routed(scores, choice, s.top_k)
        balance = switch_balance(weight, scores / scores.sum(dim=-1, keepdim=True), s.top_k)
        y, amax = all_experts(
            x, weight * s.routed_scaling, experts.w1, experts.w3, experts.w2, quant, limit=s.limit
        )
        y = y + self.shared_experts(x)
        return y, Routed(balance, amax, (weight.detach() > 0).float().mean(dim=0))


class Layer(nn.Module):
    def __init__(self, s: StreamShape, i: int):
        super().__init__()
        self.s = s
        self.attn_norm, self.ffn_norm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)
        self.attn = CompressedAttention(s, s.rates[i])
        self.ffn = MoE(s, by_id=i < s.hash_layers)
        S = s.streams
        for part in ("attn", "ffn"):  # at first streams are hardly mixed, and all have an equal part
            base = torch.cat((torch.full((S,), -1.0), torch.zeros(S), 4 * torch.eye(S).flatten()))
            setattr(self, f"hc_{part}_fn", matrix(S * (S + 2), S * s.hidden, std=0.02))
            setattr(self, f"hc_{part}_base", nn.Parameter(base))
            setattr(self, f"hc_{part}_scale", nn.Parameter(torch.full((3,), 0.5)))

    def forward(
        self, x: Tensor, context: Context, quant: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Routed]:
        taken, post, x = self._connect("attn", x)
        y, index_loss = self.attn(self.attn_norm(taken), context)
        x = x + (post[..., None] * y[:, None]).to(x.dtype)
        taken, post, x = self._connect("ffn", x)
        y, found = self.ffn(self.ffn_norm(taken), context.ids, quant)
        return x + (post[..., None] * y[:, None]).to(x.dtype), found._replace(
            balance=found.balance + index_loss
        )

    def _connect(self, part: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the input [T, H] of a block, post [T, S], the streams [T, S, H] mixed)"""
        s = self.s
        fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        sizes = [s.streams, s.streams, s.streams**2]
        products = zip(
            stream_products(x, fn, s.eps).split(sizes, dim=-1), scale, base.split(sizes), strict=True
        )
        pre, post, mix = (product * by + offset for product, by, offset in products)
        mix = mix.unflatten(-1, (s.streams, s.streams)).softmax(dim=-1) + STREAM_EPS
        mix = mix / (mix.sum(dim=-2, keepdim=True) + STREAM_EPS)
        for _ in range(s.iterations - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + STREAM_EPS)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + STREAM_EPS)
        mixed = (mix.mT @ x.float()).to(x.dtype)
        return joined(torch.sigmoid(pre) + STREAM_EPS, x), 2 * torch.sigmoid(post), mixed


STREAM_EPS = 1e-6


def stream_products(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = x.flatten(1).float()
    return F.linear(F.rms_norm(flat, flat.shape[-1:], eps=eps), fn)


def joined(weights: Tensor, x: Tensor) -> Tensor:
    return (weights[..., None] * x).sum(dim=1).to(x.dtype)


class StreamModel(ReleasedModel):
    long_rope: Tensor

    def __init__(self, shape: StreamShape, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.shape, self.dtype = shape, dtype
        self.embed, self.head = nn.Module(), nn.Module()
        self.embed.weight = matrix(shape.vocab, shape.hidden, std=0.02)
        self.head.weight = matrix(shape.vocab, shape.hidden, std=0.02)
        self.layers = nn.ModuleList([Layer(shape, i) for i in range(shape.layers)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.hc_head_fn = matrix(shape.streams, shape.streams * shape.hidden, std=0.02)
        self.hc_head_base = nn.Parameter(torch.full((shape.streams,), -1.0))
        self.hc_head_scale = nn.Parameter(torch.full((1,), 0.5))
        for name, theta in (("rope", shape.rope_theta), ("long_rope", shape.long_theta)):
            table = rope_table(shape.max_positions, theta, shape.rope_dim)
            self.register_buffer(name, table, persistent=False)

    def forward(self, batch: Batch, quant: Quantization | None = None) -> Output:
        s = self.shape
        context = self._context(batch)
        x = F.embedding(batch.ids, self.embed.weight).to(self.dtype)[:, None].expand(-1, s.streams, -1)
        found = []
        for i, layer in enumerate(self.layers):
            x, routed = layer(x, context, None if quant is None else (quant.mode[i], quant.amax[i]))
            found.append(routed)
        weights = stream_products(x, self.hc_head_fn, s.eps) * self.hc_head_scale + self.hc_head_base
        hidden = self.norm(joined(torch.sigmoid(weights) + STREAM_EPS, x))
        balance, amax, load = (torch.stack(parts) for parts in zip(*found, strict=True))
        return Output(hidden, balance.mean(), amax, None, load)

    def _context(self, batch: Batch) -> Context:
        rows = rows_of(batch.ids)
        start = batch.start.unflatten(0, (rows, -1))
        at = torch.arange(start.shape[1], device=start.device)
        ages = at[:, None] - at
        recent = (ages >= 0) & (ages < self.shape.window) & (start[..., None] == start[:, None])
        rope, long = (table.to(self.dtype) for table in (self.rope, self.long_rope))
        windows = {rate: windows_of(batch, rows, rate, long) for rate in {*self.shape.rates} - {0}}
        return Context(batch.ids, recent, windows, (rope[batch.position], long[batch.position]))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head.weight.to(self.dtype))

    def compile_layers(self) -> None:
        for layer in self.layers:
            layer.compile(dynamic=False)

    def biases(self) -> list[Tensor | None]:
        return [getattr(layer.ffn.gate, "bias", None) for layer in self.layers]
