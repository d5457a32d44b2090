"""Take uPlot, which draws the dashboard's time lines, from its npm package into the repository.

python -m tools.vendor_uplot             needs npm
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.6.32"  # and its SHA-512, as npm has it:
SHA512 = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
FOLDER = Path(__file__).parents[1] / "turnout" / "assets" / "dashboard" / "vendor"
# What is taken, its name here, and the SHA-256 that a test compares with.
FILES = {
    "package/dist/uPlot.iife.min.js": (
        "uPlot.iife.min.js",
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    ),
    "package/dist/uPlot.min.css": (
        "uPlot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    "package/LICENSE": (
        "uPlot-LICENSE.txt",
        "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    ),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", f"uplot@{VERSION}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if found != SHA512:
            raise SystemExit(
                f"uplot {VERSION}: SHA-512 is {found}, but {SHA512} was expected; nothing is taken"
            )
        with tarfile.open(package) as archive:
            for name, (here, _) in FILES.items():
                member = archive.extractfile(name)
                assert member is not None, name
                (FOLDER / here).write_bytes(member.read())


if __name__ == "__main__":
    main()
