"""Latent attention of prompts in its expanded form: our kernel in several tiles, and by spans torch's kernels
and flash-attn-4, where it is installed.

    python -m tools.latent_prompts --output benchmarks/results/latent-prompts-DEVICE-DATE.json

Keys and values of 128 + 64 and 128 values (DeepSeek-V3, 128 heads and the 16 of a rank of 8) and of 192 + 64
and 256 (GLM-4.7-Flash, 20 heads) in bfloat16. Times are of one layer without the product that makes keys and
values, which `made_us` is; those by spans include the padding and joining that these need. `tflop_per_s`
counts the products that causal attention has. `error` is the largest difference from attention in float32
over some rows; tiles that miss BOUND, or that the GPU has no room for, are reported and not timed.

--device cpu --tokens 40 --num-heads 2 shows on any machine that it runs, in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tools.kernel_timing import device_of, device_parser, keep, line, seconds_of
from turnout.attention.backends.flash_attn_4 import latent as flash_attn_4
from turnout.attention.backends.flash_attn_4.declaration import PACKAGE
from turnout.attention.latent import Attend, attend, attend_expanded
from turnout.attention.up_projection import UpProjection

if TYPE_CHECKING:
    from turnout.kernels.attention.latent_prefill import Tiles

LATENT, ROPE = 512, 64
LIBRARIES: dict[str, Attend] = {"torch": attend, "flash-attn-4": flash_attn_4.attend}
BOUND = 3e-2  # of values near 1 in bfloat16
CHECKED = 8  # rows


@dataclass(frozen=True)
class Case:
    num_heads: int
    nope: int
    value: int
    prompts: int
    tokens: int

    @property
    def products(self) -> int:
        pairs = self.prompts * self.tokens * (self.tokens + 1) // 2
        return 2 * pairs * self.num_heads * (self.nope + ROPE + self.value)


CASES = (
    Case(128, 128, 128, 1, 4096),
    Case(128, 128, 128, 4, 2048),
    Case(128, 128, 128, 1, 16384),
    Case(16, 128, 128, 1, 4096),
    Case(20, 192, 256, 8, 1024),
    Case(20, 192, 256, 1, 4096),
)


def candidates() -> list[Tiles]:
    from turnout.kernels.attention.latent_prefill import Tiles

    return [
        Tiles(128, 64, 8, 2),
        Tiles(128, 64, 8, 3),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(128, 32, 8, 3),
        Tiles(64, 32, 4, 3),
    ]


class Bench:
    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        rest: Any = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
        N, H = case.prompts * case.tokens, case.num_heads
        self.up = UpProjection(torch.randn(H, case.nope + case.value, LATENT, **rest) * 0.04, case.nope)
        self.q = torch.randn(N, H, case.nope + ROPE, **rest)
        self.latent = torch.randn(N, LATENT + ROPE, **rest)
        self.out = torch.empty(N, H, case.value, **rest)
        self.scale = (case.nope + ROPE) ** -0.5
        self.rows = torch.randint(N, (CHECKED,)).tolist()
        self.wanted = torch.stack([self._expected(row) for row in self.rows])

    def _expected(self, row: int) -> Tensor:
        """float32 [H, Dv]"""
        first = row - row % self.case.tokens
        wide = UpProjection(self.up.weight_HXL.float(), self.case.nope)
        k_HLD, v_HLV = wide.expand(self.latent[first : row + 1].float())
        scores_HL = (k_HLD @ self.q[row].float()[..., None])[..., 0] * self.scale
        return (scores_HL.softmax(-1)[:, None] @ v_HLV)[:, 0]

    def error(self) -> float:
        return float((self.out[self.rows].float() - self.wanted).abs().max())

    def by_spans(self, by: Attend) -> None:
        for prompt in range(self.case.prompts):
            rows = slice(prompt * self.case.tokens, (prompt + 1) * self.case.tokens)
            given = self.q[rows], self.latent[rows], self.up, self.scale, (self.latent, None)
            self.out[rows] = attend_expanded(*given, by=by)

    def measure(self, name: str, sizes: Tiles | None = None) -> dict[str, Any]:
        """Of the kernel in these tiles; None: of a library by spans. `us` where it was timed."""
        from triton.runtime.errors import OutOfResources

        from turnout.kernels.attention import latent_prefill, prefill

        case = self.case
        row: dict[str, Any] = vars(case) | {"by": name, "tiles": None if sizes is None else sizes._asdict()}
        self.out.fill_(torch.nan)
        if sizes is None:
            run = partial(self.by_spans, LIBRARIES[name])
        else:
            parts = latent_prefill.key_parts(case.nope, ROPE, case.value)
            assert parts is not None
            chunks = [(first, 0, case.tokens, first) for first in range(0, len(self.q), case.tokens)]
            tiles, made = prefill.tiles(chunks, sizes.rows).to(self.device), self.up.made(self.latent)
            rest: Any = {"scale": self.scale, "parts": parts, "sizes": sizes}

            def run() -> None:
                latent_prefill.attend(self.q, made, self.latent, tiles, self.out, **rest)

        try:
            run()
        except OutOfResources as error:
            return row | {"error_message": str(error)}
        row["error"] = self.error()
        if not row["error"] < BOUND:
            return row | {"error_message": "wrong"}
        seconds = seconds_of(run, self.device)[0]
        made_s = seconds_of(lambda: self.up.made(self.latent), self.device)[0]
        if sizes is None:
            seconds -= made_s
        return row | {
            "us": seconds * 1e6,
            "made_us": made_s * 1e6,
            "tflop_per_s": case.products / seconds / 1e12,
        }


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--num-heads", type=int, help="of one case, of DeepSeek's sizes")
    parser.add_argument("--tokens", type=int, default=4096, help="of that case")
    options = parser.parse_args()
    device = device_of(options)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for case in (Case(options.num_heads, 128, 128, 2, options.tokens),) if options.num_heads else CASES:
        bench = Bench(case, device)
        ours = candidates() if device.type == "cuda" else candidates()[-1:]
        known = [("triton", sizes) for sizes in ours] + [("torch", None)]
        for name, sizes in known if PACKAGE.lacking() else [*known, ("flash-attn-4", None)]:
            rows.append(bench.measure(name, sizes))
            print(line(rows[-1]))
    keep("latent_prompts", rows, options)


if __name__ == "__main__":
    main()
