"""Routers: logits to expert ids and weights.

Everything that shapes a weight (renormalisation, group limits, correction bias, scaling factor) is
applied here, once, and nowhere downstream. Padding gets its id here too.

The choice of most models is one kernel (kernels/common/route.py on CUDA, kernels/cpu/route.py on a CPU).

Legend: T tokens, E experts, k top-k, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.kernels import cpu
from turnout.moe.batch import LateChoice
from turnout.moe.spec import Routing
from turnout.packages import runs_triton
from turnout.vocabulary import RoutingKind

Choose = Callable[..., tuple[Tensor, Tensor]]
FUSED_EXPERTS = 1024  # beyond, a row of logits does not stay in registers


class Router:
    """Chooses experts from a layer's logits, and counts how often it chose each.

    adds_parts: whether logits may come as float32 parts [P, T, E], whose sum is meant.
    """

    def __init__(
        self,
        routing: Routing,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device,
        correction_bias: Tensor | None = None,
        experts_of_token: Tensor | None = None,
    ) -> None:
        """experts_of_token: int32 [V, k], which ids of tokens choose by instead of their scores."""
        self._experts_of_token = experts_of_token
        self._routing, self._top_k, self._correction_bias = routing, top_k, correction_bias
        self._choose = _one_kernel(device, num_experts, routing, correction_bias, experts_of_token)
        self.adds_parts = device.type == "cuda" and self._choose is not None
        # Whether a runner may choose in its place: by the softmax alone.
        by_softmax = routing.kind in (RoutingKind.SOFTMAX_TOPK, RoutingKind.TOPK_SOFTMAX)
        self._may_be_late = self.adds_parts and by_softmax and experts_of_token is None

    def __call__(
        self,
        logits: Tensor,
        real_T: Tensor | None,
        counts_E: Tensor,
        token_ids_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `route`; rows that `real`, bool [T], denies get ids -1 and weights 0. counts, int64 [E], grow by
        the choices. token_ids: int64 [T], where experts are chosen by them. Never waits for the device."""
        by_token = {} if self._experts_of_token is None else {"token_ids_T": token_ids_T}
        if self._choose:
            return self._choose(
                logits,
                self._top_k,
                renormalize=self._routing.renormalize,
                scaling=self._routing.scaling_factor,
                real_T=real_T,
                counts_E=counts_E,
                **by_token,
            )
        if self._experts_of_token is not None:
            assert token_ids_T is not None, "the layer chooses experts by token id"
            ids_TK, weights_TK = weigh(logits, self._experts_of_token[token_ids_T], self._routing)
        else:
            ids_TK, weights_TK = route(logits, self._routing, self._top_k, self._correction_bias)
        if real_T is not None:
            ids_TK = ids_TK.masked_fill(~real_T[:, None], -1)
            weights_TK = weights_TK.masked_fill(~real_T[:, None], 0)
        chosen = ids_TK.flatten().long()
        counts_E.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())
        return ids_TK, weights_TK

    def late(self, logits_P1E: Tensor, real_1: Tensor | None, counts_E: Tensor) -> LateChoice | None:
        """For one token, what a runner's kernels choose by; None where they cannot choose as a call does."""
        if not self._may_be_late:
            return None
        of_all = self._routing.kind == RoutingKind.SOFTMAX_TOPK and not self._routing.renormalize
        return LateChoice(
            logits_P1E=logits_P1E,
            top_k=self._top_k,
            of_all=of_all,
            scaling=self._routing.scaling_factor,
            real_1=real_1,
            counts_E=counts_E,
        )


def _one_kernel(
    device: torch.device,
    num_experts: int,
    routing: Routing,
    bias_E: Tensor | None,
    experts_of_token: Tensor | None,
) -> Choose | None:
    """What chooses in one launch here, if anything does."""
    roots = routing.kind == RoutingKind.SQRT_SOFTPLUS_TOPK
    by_sigmoid = routing.kind == RoutingKind.SIGMOID_TOPK or roots
    of_all = routing.kind == RoutingKind.SOFTMAX_TOPK
    if runs_triton(device) and num_experts <= FUSED_EXPERTS:
        from turnout.kernels.common.route import choose, choose_of_token, choose_sigmoid

        if experts_of_token is not None:
            return partial(choose_of_token, table_VK=experts_of_token)
        if by_sigmoid:
            return partial(
                choose_sigmoid, bias_E=bias_E, groups=routing.n_group, kept=routing.topk_group, roots=roots
            )
        return partial(choose, of_all=of_all)
    if device.type == "cpu" and cpu.available() and not by_sigmoid and experts_of_token is None:
        from turnout.kernels.cpu.route import choose as choose_on_cpu

        return partial(choose_on_cpu, of_all=of_all)
    return None


def route(
    logits_TE: Tensor, routing: Routing, top_k: int, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of every token, and their weights.

    logits_TE: any float dtype; scores are computed in float32
    correction_bias: float [E], for "sigmoid_topk" only; it moves the choice but not the weights
    Returns topk_ids int32 [T, k] and topk_weights float32 [T, k].
    """
    ids_TK, weights_TK = ROUTERS[routing.kind](logits_TE.float(), routing, top_k, correction_bias)
    if routing.scaling_factor != 1.0:
        weights_TK = weights_TK * routing.scaling_factor
    return ids_TK.int(), weights_TK


def weigh(logits_TE: Tensor, ids_TK: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As `route`, of experts that are chosen already: by the square roots of softplus of their logits."""
    weights_TK = _sqrt_softplus(logits_TE.float()).gather(1, ids_TK.long())
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK.int(), weights_TK * routing.scaling_factor


def _sqrt_softplus(logits_TE: Tensor) -> Tensor:
    return F.softplus(logits_TE).sqrt()


def _sqrt_softplus_topk(
    logits_TE: Tensor, routing: Routing, top_k: int, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V4."""
    scores_TE = _sqrt_softplus(logits_TE)
    choice_TE = scores_TE if correction_bias is None else scores_TE + correction_bias.float()
    ids_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK


def _softmax_topk(logits_TE: Tensor, routing: Routing, top_k: int, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Qwen2-MoE, Qwen3-MoE."""
    weights_TK, ids_TK = logits_TE.softmax(dim=-1).topk(top_k, dim=-1)
    if routing.renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return ids_TK, weights_TK


def _sigmoid_topk(
    logits_TE: Tensor, routing: Routing, top_k: int, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3 (technical report, section 2.1.2, and its published inference code).

    A group counts as much as its two best biased scores together; experts of the other groups are out.
    """
    scores_TE = logits_TE.sigmoid()
    # Without a bias logits are in the same order, and large ones, whose scores are all 1, in no tie.
    choice_TE = logits_TE if routing.n_group == 1 else scores_TE
    if correction_bias is not None:
        choice_TE = scores_TE + correction_bias.float()
    if routing.n_group > 1:
        choice_TGe = choice_TE.unflatten(-1, (routing.n_group, -1))
        best = min(2, choice_TGe.shape[-1])
        group_score_TG = choice_TGe.topk(best, dim=-1).values.sum(dim=-1)
        group_ids_Tg = group_score_TG.topk(routing.topk_group, dim=-1).indices
        outside_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(1, group_ids_Tg, False)
        choice_TE = choice_TGe.masked_fill(outside_TG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK


def _topk_softmax(logits_TE: Tensor, _: Routing, top_k: int, __: Tensor | None) -> tuple[Tensor, Tensor]:
    """GPT-OSS."""
    chosen_TK, ids_TK = logits_TE.topk(top_k, dim=-1)
    return ids_TK, chosen_TK.softmax(dim=-1)


Choice = Callable[[Tensor, Routing, int, Tensor | None], tuple[Tensor, Tensor]]

ROUTERS: dict[RoutingKind, Choice] = {
    RoutingKind.SOFTMAX_TOPK: _softmax_topk,
    RoutingKind.SIGMOID_TOPK: _sigmoid_topk,
    RoutingKind.TOPK_SOFTMAX: _topk_softmax,
    RoutingKind.SQRT_SOFTPLUS_TOPK: _sqrt_softplus_topk,
}
