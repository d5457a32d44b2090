"""`turnout eval`: a task against a model on a server of our own, or against another server."""

from __future__ import annotations

from turnout.config import Config
from turnout.errors import UserError
from turnout.evals.run import EvalOptions, run


def evaluate(config: Config, options: EvalOptions, *, own: bool, base_url: str, api_key: str) -> int:
    """The exit code, 1 below --min-accuracy. own: whether to serve the model of `config`, see `evals.run`."""
    if own == bool(base_url):
        raise UserError("eval needs either MODEL or --base-url URL")
    return run(options, config=config if own else None, base_url=base_url, api_key=api_key)
