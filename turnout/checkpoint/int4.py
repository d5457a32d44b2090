"""INT4 weights as compressed-tensors (llm-compressor) packs them: format `pack-quantized`, W4A16.

Per linear layer, G columns sharing a scale (all K of them for strategy `channel`):

    weight_packed      int32 [N, ceil(K/8)]     eight codes q + 8 per word, the first in the lowest bits
    weight_scale       float [N, K/G]
    weight_zero_point  int32 [ceil(N/8), K/G]   asymmetric only: z + 8, packed along N
    weight_shape       int64 [2]                N and K
    weight_g_idx       int32 [K]                each column's group, where GPTQ reordered them (`actorder`)

A weight is (q - z) * scale, z being 0 where there are no zero points, rounded to the dtype of the scale.
Dense layers are decoded while they load. So are experts with zero points, with reordered columns, or with
scales of another dtype than bfloat16; other experts are `Format.INT4` as they are, but for scales of more
than 32 columns, which are repeated for every 32.

Source: compressed-tensors, `compressors/pack_quantized`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.checkpoint import decoded
from turnout.checkpoint.experts import PerExpert, Wanted
from turnout.checkpoint.files import FLOATS, TensorFiles
from turnout.checkpoint.parts import ROWS_AT_ONCE, Part, require_columns
from turnout.formats.experts import ExpertWeights
from turnout.formats.int4 import GROUP, OFFSET
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

PER_WORD = 8  # codes in an int32
PACKED = Part(".weight_packed", (torch.int32,), columns=PER_WORD)
SCALE, SHAPE, ORDER = ".weight_scale", ".weight_shape", ".weight_g_idx"
WHY = "config.json says that this module is stored as INT4"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Int4:
    """group: columns that share a scale, 0 for all of a row. packed: experts stay so."""

    group: int
    symmetric: bool
    packed: bool = False

    def linear(self, files: TensorFiles, module: str, n: int, k: int) -> PackedTensor:
        """Decoded to the dtype of its scales, in which the exporting library decodes it too."""
        group = self.group or k
        require_columns(files, module, k, group)
        self._check_shape(files, module, n, k)
        words = PACKED.read(files, module, n, k, WHY)
        scale = Part(SCALE, FLOATS, columns=group).read(files, module, n, k, WHY)
        zero = None
        if not self.symmetric:
            packed = Part(".weight_zero_point", (torch.int32,), rows=PER_WORD, columns=group)
            zero = unpack(packed.read(files, module, n, k, WHY).T, n).T
        place = _group_of_columns(files, module, k, group)
        out = torch.empty((n, k), dtype=scale.dtype)
        for start in range(0, n, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            value = unpack(words[rows], k).float()
            if zero is not None:
                value -= zero[rows].float().index_select(1, place)
            out[rows] = value.mul_(scale[rows].float().index_select(1, place))
        return PackedTensor(format=Format.BF16, data=out)

    def experts(self, wanted: Wanted) -> ExpertWeights:
        if not self.packed:
            return decoded.experts(wanted, self.linear)
        stored = PerExpert(wanted)
        return stored.weights(lambda matrix: self._matrix(wanted, stored, matrix))

    def _matrix(self, wanted: Wanted, stored: PerExpert, matrix: str) -> PackedTensor:
        n, k = wanted.shape.matrix(matrix)
        files, group = wanted.files, self.group or k
        require_columns(files, wanted.prefix, k, self.group or GROUP)
        modules = stored.modules(matrix)
        for module in modules:
            self._check_shape(files, module, wanted.count * n // len(modules), k)
            if not torch.equal(_group_of_columns(files, module, k, group), torch.arange(k) // group):
                found = "columns in another order"
                raise files.wrong(module + ORDER, "reorders columns", '"actorder" in config.json', found, WHY)
        words, scale = (
            stored.read(matrix, PACKED),
            stored.read(matrix, Part(SCALE, FLOATS, columns=self.group)),
        )
        if scale.dtype != torch.bfloat16:
            logger.warning("%s: scales of INT4 are rounded from %s to bfloat16", wanted.prefix, scale.dtype)
        scale = scale.bfloat16().repeat_interleave(group // GROUP, dim=-1)
        return PackedTensor(format=Format.INT4, data=words.view(torch.uint8), scale=scale)

    def _check_shape(self, files: TensorFiles, module: str, n: int, k: int) -> None:
        """The words hold no hint of how many columns the last of them has."""
        name = module + SHAPE
        if name in files:
            found = files.read(name).tolist()
            if found != [n, k]:
                raise files.wrong(name, "names another shape than config.json", [n, k], found, WHY)


def unpack(words: Tensor, count: int) -> Tensor:
    """int8 codes -8..7 [..., count] of int32 words [..., ceil(count/8)]."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 0xF
    return (codes - OFFSET).to(torch.int8).flatten(-2)[..., :count]


def _group_of_columns(files: TensorFiles, module: str, k: int, group: int) -> Tensor:
    """int64 [K]: consecutive columns share a group unless the file says which do."""
    name = module + ORDER
    if name not in files:
        return torch.arange(k) // group
    files.expect(name, (k,), (torch.int32, torch.int64), why=WHY)
    place = files.read(name).long()
    groups = -(-k // group)
    if int(place.min()) < 0 or int(place.max()) >= groups:
        found = f"{int(place.min())} to {int(place.max())}"
        raise files.wrong(name, "names groups that have no scale", f"0 to {groups - 1}", found, WHY)
    return place
