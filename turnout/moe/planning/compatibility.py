"""What a runner and a dispatcher must agree on: the layout of batches, the format of tokens on the wire."""

from __future__ import annotations

from turnout.errors import Refusal, listed
from turnout.formats.spec import FORMATS, WIRE_FORMATS
from turnout.moe.budget import moves
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.limits import OTHER_DISPATCHER
from turnout.moe.planning.backend_refusals import OTHER_RUNNER
from turnout.moe.spec import MoESpec
from turnout.vocabulary import Format


def compatibility_refusals(
    runner: RunnerCapability,
    dispatcher: DispatcherCapability,
    spec: MoESpec,
    wanted: str,
    *,
    dp_size: int = 1,
) -> list[Refusal]:
    """Why this runner cannot be fed by this dispatcher. `wanted`: a wire format, or "auto"."""
    who = f"runner {runner.name} with dispatcher {dispatcher.name}"
    found = []
    if dispatcher.layout not in runner.layouts:
        found.append(
            Refusal(
                who=who,
                asked=f"layout {dispatcher.layout!r}, which the dispatcher emits",
                limit=f"the runner takes {listed(runner.layouts)}",
                remedy=f"{OTHER_RUNNER}, or {OTHER_DISPATCHER}",
            )
        )
    asked = f"--moe-dispatch-dtype {wanted}"
    if wanted not in ("auto", Format.BF16) and not moves(dispatcher.exchange, dp_size=dp_size):
        found.append(
            Refusal(
                who=f"dispatcher {dispatcher.name}",
                asked=f"{asked} with --dp-size {dp_size}",
                limit="no token is dispatched: every rank holds them all",
                remedy=f"use --moe-dispatch-dtype auto, or {OTHER_DISPATCHER}",
            )
        )
    elif wanted == Format.NVFP4 and not spec.quantized_activations:
        found.append(
            Refusal(
                who="wire",
                asked=asked,
                limit="tokens are quantised with the checkpoint's calibrated input scales, and it holds none",
                remedy="use --moe-dispatch-dtype auto, or quantise from bf16 with "
                "`turnout quantize MODEL OUT --format nvfp4 --calibrate`",
            )
        )
    elif not _wire_formats(runner, dispatcher, spec, wanted, dp_size):
        sends = listed((*dispatcher.wire_formats, *dispatcher.withheld))
        found.append(
            Refusal(
                who=who,
                asked=f"{asked} at hidden size {spec.hidden_size}",
                limit=f"the dispatcher sends {sends}; the runner takes "
                f"{listed(runner.wire_formats)}; fp8 and nvfp4 need a hidden size divisible by "
                f"{FORMATS[Format.FP8].group} and {FORMATS[Format.NVFP4].group}",
                remedy="use --moe-dispatch-dtype auto"
                if wanted != "auto"
                else f"{OTHER_RUNNER}, or {OTHER_DISPATCHER}",
            )
        )
    return found


def wire_format(
    runner: RunnerCapability,
    dispatcher: DispatcherCapability,
    spec: MoESpec,
    wanted: str,
    activation_format: Format,
    *,
    dp_size: int = 1,
) -> Format:
    """The format on the wire for a pair that has no refusals.

    The GEMMs' own format when both sides speak it: quantised before the wire instead of after it, the
    values are the same and the bytes fewer. Otherwise unquantised, which costs no accuracy.
    """
    shared = _wire_formats(runner, dispatcher, spec, wanted, dp_size)
    for choice in (activation_format, Format.BF16):
        if choice in shared:
            return choice
    return min(shared)


def _wire_formats(
    runner: RunnerCapability, dispatcher: DispatcherCapability, spec: MoESpec, wanted: str, dp_size: int
) -> set[Format]:
    """Tokens that are not sent stay as they are; NVFP4 needs scales that calibration left."""
    possible = set(WIRE_FORMATS) if moves(dispatcher.exchange, dp_size=dp_size) else {Format.BF16}
    if not spec.quantized_activations:
        possible -= {Format.NVFP4}
    shared = runner.wire_formats & dispatcher.wire_formats & possible
    return {f for f in shared if spec.hidden_size % FORMATS[f].group == 0 and wanted in ("auto", f)}
