"""GLM-4.7-Flash and Qwen3-Next in small, for training: modules whose parameters have the names of releases.

As in model.py every expert is computed for every token. Layers of Gated DeltaNet take a batch as rows of
equal length, each of which begins with a document; where another one begins, the decay forgets all before.

T tokens, R tokens of a row, H hidden, E experts, N heads, D head size; Hk/Hv key/value heads of DeltaNet,
Dk/Dv their sizes, n blocks of a row, L tokens of a block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import ROW, Batch
from .model import (
    Output,
    Quantization,
    all_experts,
    attention_within,
    matrix,
    rope_table,
    rotate,
    routed,
    switch_balance,
)

LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever the others have
BLOCK = 64
FORGET = -40.0  # a logarithm: nothing is left
BIAS_RATE = 1e-3  # that the correction bias of an expert with few or many tokens moves by in a step


@dataclass(frozen=True, kw_only=True)
class ReleasedShape:
    """What both architectures have."""

    vocab: int = 1536
    hidden: int = 256
    heads: int = 8
    top_k: int = 4
    expert_width: int = 64
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    rope_dim: int = 16
    layers: int
    experts: int
    eps: float

    @property
    def moe_layers(self) -> tuple[int, ...]:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The fields of config.json that have to do with the shape."""
        return {
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "max_position_embeddings": self.max_positions,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }


@dataclass(frozen=True, kw_only=True)
class LatentShape(ReleasedShape):
    """Behind the last layer there is a draft layer, which has experts too."""

    layers: int = 5
    experts: int = 24
    eps: float = 1e-5
    query_rank: int = 128
    latent_dim: int = 64
    nope_dim: int = 16
    value_dim: int = 32  # = nope_dim + rope_dim, as flash attention wants
    dense_width: int = 256
    routed_scaling: float = 1.8

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.layers + 1))

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "first_k_dense_replace": 1,
            "intermediate_size": self.dense_width,
            "kv_lora_rank": self.latent_dim,
            "n_group": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_key_value_heads": self.heads,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "routed_scaling_factor": self.routed_scaling,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": self.value_dim,
        }


@dataclass(frozen=True, kw_only=True)
class HybridShape(ReleasedShape):
    """Every fourth layer has attention, the others are recurrent."""

    layers: int = 8
    experts: int = 16
    eps: float = 1e-6
    kv_heads: int = 4
    head_dim: int = 32
    key_heads: int = 4
    value_heads: int = 8
    state_dim: int = 32  # Dk and Dv
    conv_width: int = 4

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": self.head_dim,
            "intermediate_size": self.expert_width * self.top_k,
            "linear_conv_kernel_dim": self.conv_width,
            "linear_key_head_dim": self.state_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.state_dim,
            "mlp_only_layers": [],
            "num_experts": self.experts,
            "num_key_value_heads": self.kv_heads,
            "partial_rotary_factor": self.rope_dim / self.head_dim,
            "shared_expert_intermediate_size": self.expert_width,
        }


class Context(NamedTuple):
    """What layers know of a batch. position, start [T] and starts as in `Batch`; cos_sin [T, 2, rope_dim];
    rows: how many the tokens are laid out in."""

    position: Tensor
    start: Tensor
    starts: Tensor
    cos_sin: Tensor
    rows: int


class Routed(NamedTuple):
    """Of an MoE layer and batch: load-balancing loss, largest magnitudes [2], share of tokens by expert [E]."""

    balance: Tensor
    amax: Tensor
    load: Tensor


class Linear(nn.Module):
    def __init__(self, rows: int, columns: int, std: float | None = None):
        super().__init__()
        self.weight = matrix(rows, columns, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm; around_one: by 1 + weight."""

    def __init__(self, size: int, eps: float, *, around_one: bool = False):
        super().__init__()
        self.eps, self.shift = eps, float(around_one)
        self.weight = nn.Parameter(torch.full((size,), 1 - self.shift))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.eps)
        return (y * (self.shift + self.weight)).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, hidden), Linear(width, hidden)
        self.down_proj = Linear(hidden, width, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Weights [T, E] that are zero for experts not chosen, and the loss that is 1 when load is even."""

    def __init__(self, s: ReleasedShape):
        super().__init__()
        self.top_k = s.top_k
        self.scaling = s.routed_scaling if isinstance(s, LatentShape) else None
        self.weight = matrix(s.experts, s.hidden)
        if self.scaling is not None:
            self.register_buffer("e_score_correction_bias", torch.zeros(s.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.scaling is None:
            probability = F.linear(x, self.weight.to(x.dtype)).float().softmax(dim=-1)
            weight = routed(probability, probability, self.top_k)
            return weight, switch_balance(weight, probability, self.top_k)
        scores = F.linear(x.float(), self.weight).sigmoid()
        weight = routed(scores, scores + self.e_score_correction_bias, self.top_k)
        balance = switch_balance(weight, scores / scores.sum(dim=-1, keepdim=True), self.top_k)
        return weight * self.scaling, balance


class Experts(nn.Module):
    def __init__(self, s: ReleasedShape):
        super().__init__()
        self.gate_proj = matrix(s.experts, s.expert_width, s.hidden)
        self.up_proj = matrix(s.experts, s.expert_width, s.hidden)
        self.down_proj = matrix(s.experts, s.hidden, s.expert_width, std=0.02)

    def forward(
        self, x: Tensor, weight_TE: Tensor, quant: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        return all_experts(x, weight_TE, self.gate_proj, self.up_proj, self.down_proj, quant)


class MoE(nn.Module):
    def __init__(self, s: ReleasedShape):
        super().__init__()
        self.gate, self.experts = Router(s), Experts(s)
        if isinstance(s, LatentShape):
            self.shared_experts = GatedMLP(s.hidden, s.expert_width)
        else:
            self.shared_expert = GatedMLP(s.hidden, s.expert_width)
            self.shared_expert_gate = Linear(1, s.hidden)

    def forward(self, x: Tensor, quant: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Routed]:
        weight_TE, balance = self.gate(x)
        y, amax = self.experts(x, weight_TE, quant)
        if hasattr(self, "shared_experts"):
            y = y + self.shared_experts(x)
        else:
            y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y, Routed(balance, amax, (weight_TE.detach() > 0).float().mean(dim=0))


class LatentAttention(nn.Module):
    """In its expanded form: keys and values of every head."""

    def __init__(self, s: LatentShape):
        super().__init__()
        self.s = s
        head = s.nope_dim + s.rope_dim
        self.q_a_proj = Linear(s.query_rank, s.hidden)
        self.q_a_layernorm = Norm(s.query_rank, LATENT_EPS)
        self.q_b_proj = Linear(s.heads * head, s.query_rank)
        self.kv_a_proj_with_mqa = Linear(s.latent_dim + s.rope_dim, s.hidden)
        self.kv_a_layernorm = Norm(s.latent_dim, LATENT_EPS)
        self.kv_b_proj = Linear(s.heads * (s.nope_dim + s.value_dim), s.latent_dim)
        self.o_proj = Linear(s.hidden, s.heads * s.value_dim, std=0.02)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.s
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (s.heads, -1))
        q, q_rope = q.split([s.nope_dim, s.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.latent_dim, s.rope_dim], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, -1))
        k, v = made.split([s.nope_dim, s.value_dim], dim=-1)
        k_rope = _rotate_pairs(k_rope.unsqueeze(1), context.cos_sin).expand(-1, s.heads, -1)
        q = torch.cat((q, _rotate_pairs(q_rope, context.cos_sin)), dim=-1)
        return self.o_proj(_attend(context, q, torch.cat((k, k_rope), dim=-1), v).flatten(-2))


class GatedAttention(nn.Module):
    def __init__(self, s: HybridShape):
        super().__init__()
        self.s = s
        self.q_proj = Linear(s.heads * 2 * s.head_dim, s.hidden)
        self.k_proj = Linear(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = Linear(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = Linear(s.hidden, s.heads * s.head_dim, std=0.02)
        self.q_norm = Norm(s.head_dim, s.eps, around_one=True)
        self.k_norm = Norm(s.head_dim, s.eps, around_one=True)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.s
        q, gate = self.q_proj(x).unflatten(-1, (s.heads, 2 * s.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        v = self.v_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        q, k = (
            torch.cat((rotate(y[..., : s.rope_dim], context.cos_sin), y[..., s.rope_dim :]), dim=-1)
            for y in (self.q_norm(q), self.k_norm(k))
        )
        return self.o_proj((_attend(context, q, k, v) * torch.sigmoid(gate)).flatten(-2))


class DeltaNet(nn.Module):
    """See turnout/attention/delta_rule.py for the arithmetic."""

    def __init__(self, s: HybridShape):
        super().__init__()
        self.s, self.repeat = s, s.value_heads // s.key_heads
        self.parts = [s.state_dim, s.state_dim, self.repeat * s.state_dim, self.repeat * s.state_dim]
        channels = (2 * s.key_heads + s.value_heads) * s.state_dim
        self.in_proj_qkvz = Linear(s.key_heads * sum(self.parts), s.hidden)
        self.in_proj_ba = Linear(2 * s.value_heads, s.hidden)
        self.conv1d = nn.Module()
        self.conv1d.weight = matrix(channels, 1, s.conv_width)
        self.A_log = nn.Parameter(torch.empty(s.value_heads).uniform_(0.5, 8).log())
        self.dt_bias = nn.Parameter(torch.empty(s.value_heads).uniform_(-5, -1))
        self.norm = Norm(s.state_dim, s.eps)
        self.out_proj = Linear(s.hidden, s.value_heads * s.state_dim, std=0.02)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        s = self.s
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (s.key_heads, -1)).split(self.parts, dim=-1)
        b, a = self.in_proj_ba(x).float().unflatten(-1, (s.key_heads, -1)).chunk(2, dim=-1)
        mixed = torch.cat([y.flatten(-2) for y in (q, k, v)], dim=-1)
        mixed = F.silu(self._convolve(mixed, context.position).float())
        sizes = [s.key_heads * s.state_dim] * 2 + [s.value_heads * s.state_dim]
        q, k, v = (y.unflatten(-1, (-1, s.state_dim)) for y in mixed.split(sizes, dim=-1))
        q, k = (
            (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(self.repeat, dim=1)
            for y in (q, k)
        )
        g = -self.A_log.exp() * F.softplus(a.flatten(1) + self.dt_bias)
        g = torch.where((context.position == 0)[:, None], FORGET, g)
        rows = [y.unflatten(0, (context.rows, -1)) for y in (q * s.state_dim**-0.5, k, v, b.flatten(1), g)]
        out = delta_rule(*rows[:3], rows[3].sigmoid(), rows[4]).flatten(0, 1)
        gated = self.norm(out) * F.silu(z.float()).reshape(out.shape)
        return self.out_proj(gated.to(x.dtype).flatten(-2))

    def _convolve(self, x: Tensor, position: Tensor) -> Tensor:
        weight = self.conv1d.weight[:, 0].to(x.dtype)
        width = self.s.conv_width
        out = x * weight[:, -1]
        for back in range(1, width):
            before = F.pad(x, (0, 0, back, 0))[: len(x)]
            out = out + torch.where((position >= back)[:, None], before, 0) * weight[:, width - 1 - back]
        return out


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """[rows, R, Hv, Dv] of float32 q, k, v [rows, R, Hv, D] and beta, g [rows, R, Hv]; states begin at 0."""
    length = q.shape[1]
    q, k, v, beta, g = (_blocks(x) for x in (q, k, v, beta[..., None], g[..., None]))
    sums = g.cumsum(3)  # [rows, Hv, n, L, 1]
    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    decay = (sums - sums.mT).masked_fill(~lower, float("-inf")).exp()  # [..., L, L]
    mixing = (beta * decay * (k @ k.mT)).tril(-1)
    right = torch.cat((beta * v, beta * sums.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = decay * (q @ k.mT)
    ends = sums[..., -1:, :]
    q, k = q * sums.exp(), (k * (ends - sums).exp()).mT
    state = q.new_zeros(*q.shape[:2], k.shape[-2], v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        d = values[:, :, n] - keys[:, :, n] @ state
        out.append(scores[:, :, n] @ d + q[:, :, n] @ state)
        state = ends[:, :, n].exp() * state + k[:, :, n] @ d
    return torch.stack(out, dim=2).flatten(2, 3).transpose(1, 2)[:, :length]


def _blocks(x: Tensor) -> Tensor:
    """[rows, Hv, n, L, D] of [rows, R, Hv, D], padded with zeros."""
    short = -x.shape[1] % BLOCK
    return F.pad(x.transpose(1, 2), (0, 0, 0, short)).unflatten(2, (-1, BLOCK))


class Layer(nn.Module):
    def __init__(self, s: ReleasedShape, i: int):
        super().__init__()
        around_one = isinstance(s, HybridShape)
        self.input_layernorm = Norm(s.hidden, s.eps, around_one=around_one)
        self.post_attention_layernorm = Norm(s.hidden, s.eps, around_one=around_one)
        if isinstance(s, LatentShape):
            self.self_attn: nn.Module = LatentAttention(s)
        elif isinstance(s, HybridShape) and (i + 1) % 4 == 0:
            self.self_attn = GatedAttention(s)
        else:
            assert isinstance(s, HybridShape)
            self.linear_attn = DeltaNet(s)
        dense = isinstance(s, LatentShape) and i == 0
        self.mlp = GatedMLP(s.hidden, s.dense_width) if dense else MoE(s)

    def forward(
        self, x: Tensor, context: Context, quant: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Routed | None]:
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        x = x + mixer(self.input_layernorm(x), context)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, GatedMLP):
            return x + self.mlp(normed), None
        y, found = self.mlp(normed, quant)
        return x + y, found


class DraftLayer(Layer):
    """On the final hidden state of a token and the embedding of the next one."""

    def __init__(self, s: ReleasedShape, i: int):
        super().__init__(s, i)
        self.enorm, self.hnorm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)
        self.eh_proj = Linear(s.hidden, 2 * s.hidden)
        self.shared_head = nn.Module()
        self.shared_head.norm = Norm(s.hidden, s.eps)

    def join(self, token: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(token), self.hnorm(hidden)), dim=-1))


class Backbone(nn.Module):
    def __init__(self, s: ReleasedShape):
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = matrix(s.vocab, s.hidden, std=0.02)
        layers = [Layer(s, i) for i in range(s.layers)]
        drafts = [DraftLayer(s, s.layers)] if isinstance(s, LatentShape) else []
        self.layers = nn.ModuleList([*layers, *drafts])
        self.norm = Norm(s.hidden, s.eps, around_one=isinstance(s, HybridShape))


class ReleasedModel(nn.Module):
    rope: Tensor

    def __init__(self, shape: ReleasedShape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Backbone(shape)
        self.register_buffer(
            "rope", rope_table(shape.max_positions, shape.rope_theta, shape.rope_dim), persistent=False
        )

    def forward(self, batch: Batch, quant: Quantization | None = None) -> Output:
        m, s = self.model, self.shape
        cos_sin = self.rope[batch.position].to(self.dtype)
        context = Context(batch.position, batch.start, batch.starts, cos_sin, rows_of(batch.ids))
        x = F.embedding(batch.ids, m.embed_tokens.weight).to(self.dtype)
        found: list[Routed] = []
        for i in range(s.layers):
            x = self._layer(i, x, context, quant, found)
        hidden, drafted = m.norm(x), None
        if len(m.layers) > s.layers:
            layer = m.layers[s.layers]
            token = F.embedding(batch.ids.roll(-1), m.embed_tokens.weight).to(self.dtype)
            x = self._layer(s.layers, layer.join(token, hidden), context, quant, found)
            drafted = layer.shared_head.norm(x)
        balance, amax, load = (torch.stack(parts) for parts in zip(*found, strict=True))
        return Output(hidden, balance.mean(), amax, drafted, load)

    def _layer(
        self, i: int, x: Tensor, context: Context, quant: Quantization | None, found: list[Routed]
    ) -> Tensor:
        mine = None
        if quant is not None and i in self.shape.moe_layers:
            mine = quant.mode[len(found)], quant.amax[len(found)]
        x, routed = self.model.layers[i](x, context, mine)
        if routed is not None:
            found.append(routed)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(self.dtype))

    def compile_layers(self) -> None:
        """Layers of one kind are compiled once."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    @torch.no_grad()
    def even_out(self, load: Tensor) -> None:
        """Move correction biases towards even load [MoE layers, E], as DeepSeek-V3 does."""
        for bias_E, load_E in zip(self.biases(), load, strict=True):
            if bias_E is not None:
                bias_E += BIAS_RATE * (load_E.mean() - load_E).sign()

    def biases(self) -> list[Tensor | None]:
        """Correction biases [E] of MoE layers, None of those that have none."""
        routers = [self.model.layers[i].mlp.gate for i in self.shape.moe_layers]
        return [getattr(router, "e_score_correction_bias", None) for router in routers]

    def named(self) -> list[tuple[str, Tensor]]:
        """Every tensor under its published name."""
        named: list[tuple[str, Tensor]] = []
        for name, tensor in self.state_dict().items():
            if ".experts." not in name:
                named.append((name, tensor))
                continue
            prefix, _, projection = name.rpartition(".")
            named += [(f"{prefix}.{e}.{projection}.weight", one) for e, one in enumerate(tensor)]
        return named


def rows_of(ids: Tensor) -> int:
    """How many rows the tokens of a batch are laid out in."""
    return max(1, len(ids) // ROW)


def _attend(context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_within(context.start, context.starts, ROW)(0, q, k, v)


def _rotate_pairs(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Of x [T, heads, D] element 2 i is paired with 2 i + 1."""
    return rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2), cos_sin)
