"""The command line of a tool, whose help is its docstring."""

from __future__ import annotations

import argparse


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Prints `description` as it is laid out."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
