"""What is wrong with a checkpoint: always the file, and where there is one the tensor."""

from __future__ import annotations

from pathlib import Path

from turnout.errors import UserError


class CheckpointError(UserError):
    """A file that cannot be loaded as it says; names file, tensor, expected, found and the remedy."""

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str = "",
    ):
        self.file = Path(file)
        self.tensor = tensor
        where = f"{file}: " + (f"tensor {tensor}: " if tensor else "")
        detail = "" if expected is None else f": expected {expected}, found {found}"
        super().__init__(where + problem + detail + (f". {remedy}" if remedy else ""))
