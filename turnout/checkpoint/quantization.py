"""How a checkpoint is quantised, as one record. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from turnout.checkpoint.patterns import ModulePatterns
from turnout.errors import UserError
from turnout.vocabulary import Format

EVERYTHING = ModulePatterns.parse("modelopt", ["*"], "built in")
DECODED = {"int4": "int4", "fp8_channel": "fp8"}  # methods of which runners lack some or all -> stored as

FP8_OUTSIDE = {"deepseek_v4": Format.FP8}  # methods whose layers outside experts are so whatever experts are


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint was quantised, and which modules were not.

    Where modules differ, `others` say it of further ones: of this and those, the first whose `targets` match
    counts, and a module that none matches was not quantised. `ignore` goes for all of them.

    method: which reader understands it, a name of `checkpoint.READERS`, or "none", or "mxfp4" (GPT-OSS).
    format: what experts are kept in; bf16 where they are decoded while they load. quantized_activations: the
    writer calibrated NVFP4 activations too (W4A4), and input scales are in the checkpoint. group, symmetric:
    of INT4, the columns that share a scale (0: all of a row), and whether there are no zero points.
    """

    method: str = "none"
    format: Format = Format.BF16
    quantized_activations: bool = False
    group: int = 0
    symmetric: bool = True
    targets: ModulePatterns = EVERYTHING
    ignore: ModulePatterns = field(default_factory=ModulePatterns)
    experts_only: bool = False  # linear layers outside `experts` are never quantised
    others: tuple[Quantization, ...] = ()

    @property
    def decodes_experts(self) -> bool:
        """Whether experts become unquantised weights while they load."""
        return self.stored != self.format

    @property
    def stored(self) -> str:
        """The format in the files."""
        return DECODED.get(self.method, self.format)

    def of(self, module: str) -> Quantization | None:
        """How the linear layer called `module` is stored quantised; None if it is not."""
        if self.method == "none" or (self.experts_only and ".experts" not in module):
            return None
        if self.ignore.matches(module):
            return None
        return self._named(module)

    def _named(self, module: str) -> Quantization | None:
        return next((scheme for scheme in (self, *self.others) if scheme.targets.matches(module)), None)

    def leaving_out(self, module: str) -> Quantization:
        """The same, but that nothing in `module` was quantised."""
        return replace(self, ignore=self.ignore + ModulePatterns.parse("modelopt", [module], "built in"))

    def is_fp8(self, module: str) -> bool:
        """Whether the linear layer called `module`, which is no expert's, is stored in FP8."""
        found = self.of(module)
        return found is not None and Format.FP8 in (found.stored, FP8_OUTSIDE.get(found.method))

    def experts_format(self, prefix: str) -> tuple[Format, bool]:
        """(format, quantised activations) of the experts at `prefix`, such as `model.layers.0.mlp.experts`.

        As `of_experts`.
        """
        found = self.of_experts(prefix)
        return (found.format, found.quantized_activations) if found else (Format.BF16, False)

    def of_experts(self, prefix: str) -> Quantization | None:
        """How the experts at `prefix` are stored quantised; None if they are not.

        Records name modules of the first expert, by whichever names the family has, or the stacked ones; that
        every other expert agrees is checked when it is read. Raises UserError if projections differ.
        """
        if self.method == "none":
            return None
        named = (
            [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")],
            [f"{prefix}.0.{name}" for name in ("w1", "w3", "w2")],
            [f"{prefix}.gate_up_proj", f"{prefix}.down_proj"],
        )
        left_out = [{self.ignore.matches(module) for module in modules} for modules in named]
        schemes = [{self._named(module) for module in modules} for modules in named]
        if any(len(verdict) > 1 for verdict in left_out) or any(len(verdict) > 1 for verdict in schemes):
            raise UserError(
                f"{prefix}: some projections are listed as not quantised, or quantised otherwise, and others "
                f"are not. Experts of one layer must share a format: requantise with all of {prefix} in the "
                "list, or none of it"
            )
        if {True} in left_out:
            return None
        return next((scheme for (scheme,) in schemes if scheme is not None), None)
