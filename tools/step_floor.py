"""What a decode step must do at least: bytes to read and operations of products, by part.

A part takes no less than its bytes at BYTES_PER_S, nor than its operations at PRODUCTS_PER_S, and a step no
less than all its parts together, which depend on one another. Weights outside experts are read but for the
input embedding, experts as far as uniform routing reaches them, of caches what attention sees, and states of
requests, which are written too. Operations are two for each product of matrices and of attention; latent
attention is counted as it decodes, on the kept vectors. What a recurrence computes of a state is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tools.kernel_timing import BYTES_PER_S, PRODUCTS_PER_S
from turnout.attention.caches import AttentionCaches
from turnout.attention.kinds import AttentionSpec, CompressedSpec, SparseLatentSpec
from turnout.moe.spec import Activation
from turnout.vocabulary import ActivationKind

DENSE = ("queries", "keys_values", "mlps", "shared_experts", "replicated")  # fields of DenseParameters


@dataclass(frozen=True)
class Work:
    """Of a part of a step."""

    nbytes: float
    operations: float

    @property
    def seconds(self) -> float:
        """At least."""
        return max(self.nbytes / BYTES_PER_S, self.operations / PRODUCTS_PER_S)


def work_of_step(
    info: Mapping[str, Any], caches: AttentionCaches, requests: int, tokens: int
) -> dict[str, Work]:
    """By part, of one token of each request, whose context has so many tokens with it. info: an engine's."""
    model, memory = info["description"], info["memory"]
    itemsize = getattr(torch, info["compute_dtype"]).itemsize
    head = model["shape"]["vocab_size"] * model["shape"]["hidden_size"]
    embedding = (model["dense"]["vocabulary"] - head) * itemsize
    counts = {"head": head} | {name: model["dense"][name] for name in DENSE}
    sizes = _bytes_of(counts, model, itemsize)
    # What a plan counts has scales, and what is packed is less than its parameters.
    factor = (memory["dense"] - embedding) / sum(sizes.values())
    found = {name: Work(factor * sizes[name], 2 * requests * counts[name]) for name in counts}
    moe = model["moe"]
    reached = 1 - (1 - moe["top_k"] / moe["num_experts"]) ** requests
    products = 2 * requests * moe["top_k"] * expert_parameters(moe) * len(model["moe_layers"])
    found["experts"] = Work(reached * memory["experts"], products)
    for group in caches.groups:
        layers, spec, size = len(group.index), group.spec, group.dtype.itemsize
        seen = requests * layers * context_bytes(spec, tokens, size)
        done = requests * layers * context_operations(spec, tokens)
        found[f"attention, group {group.number}"] = Work(seen, done)
    states = 2 * sum(group.state_bytes / len(group.states[0]) for group in caches.states)
    found["states"] = Work(requests * states, 0)
    return found


def expert_parameters(moe: Mapping[str, Any]) -> int:
    """Of one expert's weights."""
    matrices = 3 if Activation(kind=ActivationKind(moe["activation"]["kind"])).gated else 2
    return matrices * moe["hidden_size"] * moe["intermediate_size"]


def _bytes_of(counts: Mapping[str, int], model: Mapping[str, Any], itemsize: int) -> dict[str, float]:
    """Of parameters outside experts, without scales; a head has the compute type."""
    fp8 = {"head": 0} | model["dense_in_fp8"]
    found = {name: float(fp8[name] + (count - fp8[name]) * itemsize) for name, count in counts.items()}
    found["replicated"] += model["dense"]["in_float32"] * (4 - itemsize)
    return found


def context_bytes(spec: AttentionSpec, tokens: int, itemsize: int) -> float:
    """What one token with a context of so many reads of it in a layer, itself included; of entries that are
    made of several tokens, what these are read for, on average."""
    if isinstance(spec, CompressedSpec):
        entries, rate = spec.entries(tokens), spec.rate
        seen, indexed = _chosen_of(spec, entries)
        made = spec.remembered * spec.open_dim / rate if rate else 0
        recent = min(tokens, spec.recent)
        return itemsize * ((recent + seen) * spec.head_dim + indexed * spec.index_dim + made)
    if isinstance(spec, SparseLatentSpec):
        seen, indexed = _chosen_of(spec, tokens)
        return seen * (spec.latent_dim + spec.rope_dim) * itemsize + indexed * spec.index_bytes(itemsize)
    return min(tokens, spec.window or tokens) * spec.token_bytes(itemsize)


def context_operations(spec: AttentionSpec, tokens: int) -> float:
    """Of one token's products with its context in a layer: scores, sums of values, an index's scores."""
    read, widths, scores = min(tokens, spec.window or tokens), spec.head_dim + spec.value_dim, 0
    if spec.latent_dim:
        widths = 2 * spec.latent_dim + spec.rope_dim
    if isinstance(spec, CompressedSpec):
        seen, indexed = _chosen_of(spec, spec.entries(tokens))
        read, scores = min(tokens, spec.recent) + seen, indexed * spec.index_heads * spec.index_dim
    elif isinstance(spec, SparseLatentSpec):
        read, indexed = _chosen_of(spec, tokens)
        scores = indexed * spec.index_heads * spec.index_dim
    return 2 * (read * spec.num_heads * widths + scores)


def _chosen_of(spec: CompressedSpec | SparseLatentSpec, entries: int) -> tuple[int, int]:
    """(entries that are attended to, entries that the index scores for that)."""
    seen = min(spec.index_topk or entries, entries)
    shared = isinstance(spec, SparseLatentSpec) and spec.shares_choice
    return seen, entries if seen < entries and not shared else 0
