"""How many files, and so connections, the system lets a server have open."""

from __future__ import annotations

import resource

from turnout.errors import UserError

FILES, FILES_OF_RANK = 40, 8  # open in a server without connections, and a few more


def allow_many_connections(ranks: int) -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: each connection takes one.

    Raises UserError where that is not enough for a server of so many `ranks`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_OF_RANK * ranks
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"this process may open {hard} files, and a server needs {needed} and one for each connection; "
            "raise the limit (`ulimit -n 4096`)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
