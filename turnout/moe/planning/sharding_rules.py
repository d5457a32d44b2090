"""How a layer divides among ranks: what no parallel layout allows, and which one would do.

Experts divide by --ep-size, and the intermediate size of each by the expert-TP ranks that share it, in whole
groups of the format's scales.
"""

from __future__ import annotations

import math
from itertools import product

from turnout.errors import Refusal
from turnout.formats.spec import FORMATS
from turnout.moe.spec import MoESpec
from turnout.parallel.topology import Topology, divisors, one_of
from turnout.vocabulary import Format

CONVERT = "convert the bf16 checkpoint to another format with `turnout quantize`"


def layer_refusals(spec: MoESpec, topology: Topology) -> list[Refusal]:
    """Why no backend at all can run `spec` on ranks so arranged."""
    found = []
    if not 1 <= spec.top_k <= spec.num_experts:
        found.append(
            Refusal(
                who="layer",
                asked=f"top-{spec.top_k} of {spec.num_experts} experts",
                limit="a token goes to at least one expert and to none twice",
                remedy="correct num_experts_per_tok or num_experts in config.json",
            )
        )
    needed = _shard_multiple(spec, topology.expert_tp)
    if spec.num_experts % topology.ep_size:
        found.append(
            Refusal(
                who="layer",
                asked=f"{spec.num_experts} experts over --ep-size {topology.ep_size}",
                limit="every rank holds the same number of experts",
                remedy=parallel_layout(spec, topology),
            )
        )
    if spec.intermediate_size % (topology.expert_tp * needed):
        found.append(
            Refusal(
                who="layer",
                asked=shards(spec, topology),
                limit=f"shards must be equal, and multiples of {needed} for {spec.format} weights",
                remedy=parallel_layout(spec, topology),
            )
        )
    if spec.hidden_size % _shard_multiple(spec, 1):
        found.append(
            Refusal(
                who="layer",
                asked=f"hidden size {spec.hidden_size}",
                limit=f"{spec.format} weights come in groups of {FORMATS[spec.format].group}",
                remedy=CONVERT,
            )
        )
    return found


def shards(spec: MoESpec, topology: Topology) -> str:
    """What is asked of the intermediate size, for refusals."""
    return f"expert intermediate size {spec.intermediate_size} over {topology.expert_tp} expert-TP rank(s)"


def parallel_layout(spec: MoESpec, topology: Topology, multiple: int = 1) -> str:
    """The remedy: the --ep-size, else --tp-size and perhaps --dp-size too, under which experts and shards
    divide, the latter by `multiple`."""
    nnodes = topology.nnodes
    expert_tps = [n for n in divisors(spec.intermediate_size) if _shards_fit(spec, n, multiple)]
    fitting: dict[int, list[int]] = {}  # --ep-size by --tp-size
    for ep_size, expert_tp in product(divisors(spec.num_experts), expert_tps):
        if ep_size * expert_tp <= topology.tp_size:
            fitting.setdefault(ep_size * expert_tp, []).append(ep_size)
    for step, dp_too in ((math.lcm(topology.dp_size, nnodes), False), (nnodes, True)):
        tp_size = max((n for n in fitting if n % step == 0), default=0)
        if tp_size:
            smaller = f"--tp-size {tp_size} " if tp_size < topology.tp_size else ""
            smaller += f"--dp-size {one_of(divisors(tp_size))} " if dp_too else ""
            return f"use {smaller}--ep-size {one_of(fitting[tp_size])}"
    return CONVERT


def _shards_fit(spec: MoESpec, expert_tp: int, multiple: int) -> bool:
    """Whether shards are whole groups, and divide by `multiple`."""
    return all(
        spec.intermediate_size % (expert_tp * unit) == 0
        for unit in (multiple, _shard_multiple(spec, expert_tp))
    )


def _shard_multiple(spec: MoESpec, expert_tp: int) -> int:
    """What a rank's shard of the intermediate size must be a multiple of, so that no scale is shared.

    FP8 blocks may be cut short at the end of a whole matrix, hence do not bind experts that are whole.
    """
    return 1 if spec.format == Format.FP8 and expert_tp == 1 else FORMATS[spec.format].group
