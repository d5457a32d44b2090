"""What a config says about rotary position embedding (RoPE). Does not import torch.

A variant is only another set of inverse frequencies, and for some a factor on cos and sin:

| rope_type | what it does                                                   | source           |
|-----------|----------------------------------------------------------------|------------------|
| default   | theta ** (-2d / D)                                             | arXiv:2104.09864 |
| linear    | all frequencies divided by `factor`                            | arXiv:2306.15595 |
| dynamic   | theta grows with the sequence beyond max_position_embeddings   | arXiv:2306.15595 |
| yarn      | slow dimensions interpolated, fast ones kept, a ramp between   | arXiv:2309.00071 |
| llama3    | the same, bounded by wavelengths                               | Llama 3.1        |
| longrope  | a searched divisor per dimension, a short and a long set       | arXiv:2402.13753 |

`dynamic` and `longrope` change the frequencies once a sequence outgrows a length. Keys already in the
cache would then have been rotated by other frequencies, so results would depend on how a prompt was
cut into chunks and on who shares its batch. Both are therefore served up to that length, where they
are exact; `max_positions` says how far.

Partial rope turns the first R dimensions of each head, in pairs (d, d + R/2); Llama-4 pairs neighbours
instead, (2d, 2d + 1). Kernels know one layout, pairs (d, d + D/2) of the whole head. `order` is how the
dimensions of queries and keys must then lie, which no score depends on; those that are not turned get an
angle of 0.

Legend: D head size, R rotated dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnout.errors import UserError
from turnout.models.fields import ConfigFields

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_THETA = 10000.0
NOPE = "none"  # what layers that do not rotate their heads declare as their rope


@dataclass(frozen=True, kw_only=True)
class Rope:
    """`adjust` maps the plain frequencies, float32 [R/2], to the variant's; `scaling` multiplies cos and
    sin; positions run below `max_positions`. rotary_dim: R. interleaved: pairs are neighbours. latent_scaling
    multiplies the scale of latent attention's scores, and of no other's."""

    head_dim: int
    rotary_dim: int
    theta: float
    max_positions: int
    adjust: Callable[[Tensor], Tensor]
    scaling: float
    latent_scaling: float
    interleaved: bool

    def still(self) -> Rope:
        """Of as large heads, none of whose dimensions turn."""
        return replace(self, rotary_dim=0, adjust=lambda plain: plain)

    @property
    def order(self) -> tuple[int, ...] | None:
        """Which dimension of a stored head comes at each place; None: they lie as they should."""
        D, R = self.head_dim, self.rotary_dim
        pairs = [(2 * d, 2 * d + 1) if self.interleaved else (d, d + R // 2) for d in range(R // 2)]
        pairs += [(d, d + (D - R) // 2) for d in range(R, R + (D - R) // 2)]
        order = tuple(first for first, _ in pairs) + tuple(second for _, second in pairs)
        return None if order == tuple(range(D)) else order


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a variant is computed from."""

    fields: ConfigFields
    head_dim: int
    rotary_dim: int
    interleaved: bool
    theta: float
    max_positions: int
    trained_positions: int  # original_max_position_embeddings

    def rope(
        self,
        adjust: Callable[[Tensor], Tensor],
        *,
        scaling: float = 1.0,
        latent_scaling: float = 1.0,
        max_positions: int | None = None,
    ) -> Rope:
        return Rope(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            theta=self.theta,
            max_positions=max_positions or self.max_positions,
            adjust=adjust,
            scaling=scaling,
            latent_scaling=latent_scaling,
        )


def read_rope(
    fields: ConfigFields,
    *,
    head_dim: int,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
    interleaved: bool = False,
    mrope: bool = False,
) -> Rope:
    """The variant that a config names, in `rope_parameters` (transformers 5) or `rope_scaling`.

    theta, partial: what the file means where it does not say; without `partial` heads are rotated whole.
    mrope: its sections are accepted, since positions of text are the same along all axes.
    Raises UserError for a variant, a field or a value that is not implemented, by name.
    """
    max_positions = fields.integer("max_position_embeddings")
    if head_dim % 2:
        raise UserError(f"{fields.where}: head_dim = {head_dim}: rotary embedding needs an even head size")
    rope = _rope_fields(fields)
    kind = str(rope.raw("rope_type") or rope.raw("type") or "default")
    if kind not in _VARIANTS:
        raise UserError(f"{rope.where}: rope_type {kind!r} is not implemented; known: {', '.join(_VARIANTS)}")
    if mrope:
        rope.unused("mrope_section", "mrope_interleaved")
    rotary_dim = _read_rotary_dim(fields, rope, head_dim, partial)
    trained = rope.integer("original_max_position_embeddings", max_positions)
    request = _Request(
        fields=rope,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        theta=rope.number("rope_theta", fields.number("rope_theta", theta, minimum=2), minimum=2),
        max_positions=max_positions,
        trained_positions=fields.integer("original_max_position_embeddings", trained),
    )
    result = _VARIANTS[kind](request)
    rope.refuse_unread(harmless=())
    return result


def _read_rotary_dim(fields: ConfigFields, rope: ConfigFields, head_dim: int, partial: float | None) -> int:
    """In the rope's own fields, or next to them."""
    if partial is None:
        rope.choice("partial_rotary_factor", (1.0, 1), default=1.0)
        return head_dim
    factor = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial))
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise UserError(
            f"{fields.where}: partial_rotary_factor = {factor:g} rotates {rotary_dim} of the {head_dim} "
            "dimensions of a head: it must be an even number of them, at least 2 and at most all"
        )
    return rotary_dim


def _rope_fields(fields: ConfigFields) -> ConfigFields:
    given = {name: fields.raw(name) for name in ("rope_scaling", "rope_parameters")}
    present = {name: value for name, value in given.items() if value}
    if len(present) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise fields.wrong("rope_scaling", "contradicts rope_parameters; keep one of them")
    for name, value in present.items():
        if not isinstance(value, dict):
            raise fields.wrong(name, "must be an object")
        if any(isinstance(v, dict) for v in value.values()):
            raise fields.wrong(name, "parameters per layer type are not implemented")
        return ConfigFields(value, f"{fields.where}: {name}")
    return ConfigFields({}, f"{fields.where}: rope_parameters")


def _default(request: _Request) -> Rope:
    return request.rope(lambda plain: plain)


def _linear(request: _Request) -> Rope:
    factor = request.fields.number("factor", minimum=1)
    return request.rope(lambda plain: plain / factor)


def _dynamic(request: _Request) -> Rope:
    request.fields.number("factor", minimum=1)  # acts only beyond max_positions, where nothing is served
    return request.rope(lambda plain: plain)


def _yarn(request: _Request) -> Rope:
    """A context of `factor` times the trained one is served even where max_position_embeddings was left
    at the trained length, as Qwen's model cards tell users to do."""
    fields, dim, trained = request.fields, request.rotary_dim, request.trained_positions
    factor = fields.number("factor", request.max_positions / trained, minimum=1)
    low, high = (
        dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(request.theta))
        for rotations in (fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0))
    )
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = [min(max((d - low) / width, 0.0), 1.0) for d in range(dim // 2)]

    def adjust(plain: Tensor) -> Tensor:
        interpolated = plain.new_tensor(ramp)
        return plain / factor * interpolated + plain * (1 - interpolated)

    return request.rope(
        adjust,
        **_yarn_scaling(fields, factor),
        max_positions=max(request.max_positions, int(factor * trained)),
    )


def _yarn_scaling(fields: ConfigFields, factor: float) -> dict[str, float]:
    """`Rope.scaling` and `Rope.latent_scaling`."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = (fields.raw(n) and fields.number(n) for n in ("mscale", "mscale_all_dim"))
    inferred = temperature(1.0)
    if mscale and mscale_all_dim:
        inferred = temperature(mscale) / temperature(mscale_all_dim)
    return {
        "scaling": fields.number("attention_factor", inferred),
        "latent_scaling": temperature(mscale_all_dim) ** 2 if mscale_all_dim else 1.0,
    }


def _llama3(request: _Request) -> Rope:
    fields, trained = request.fields, request.trained_positions
    factor = fields.number("factor", minimum=1)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high < low:
        raise fields.wrong("high_freq_factor", f"must be at least low_freq_factor ({low:g})")

    def adjust(plain: Tensor) -> Tensor:
        rotations = trained * plain / (2 * math.pi)
        if high == low:  # no ramp: Llama-4-Scout
            kept = (rotations > low).to(plain.dtype)
        else:
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return plain / factor * (1 - kept) + plain * kept

    return request.rope(adjust)


def _longrope(request: _Request) -> Rope:
    fields, trained = request.fields, request.trained_positions
    factor = fields.number("factor", request.max_positions / trained)
    short = fields.numbers("short_factor", request.rotary_dim // 2)
    fields.numbers("long_factor", request.rotary_dim // 2)  # never used, but it must be well-formed
    scaling = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 < trained else 1.0
    return request.rope(
        lambda plain: plain / plain.new_tensor(short),
        scaling=fields.number("attention_factor", scaling),
        max_positions=min(request.max_positions, trained),
    )


_VARIANTS: dict[str, Callable[[_Request], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
