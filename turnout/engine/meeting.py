"""How the ranks of one model come together: their groups, and the exchange before each step."""

from __future__ import annotations

from pathlib import Path

import torch

from turnout.engine.blueprint import Blueprint
from turnout.engine.lockstep import Lockstep
from turnout.parallel.exchange import SharedExchange
from turnout.parallel.group_exchange import GroupExchange
from turnout.parallel.groups import Groups, connect


def meet(blueprint: Blueprint, *, init_method: str, folder: Path) -> tuple[Groups, Lockstep]:
    """Join the other ranks of `blueprint`; collective. A single rank joins nobody.

    init_method: see `parallel.groups.connect`. folder: seen by all ranks of this host, and by no other run.
    """
    topology = blueprint.topology
    device = torch.device(blueprint.hardware.device)
    if device.type == "cuda":
        device = torch.device("cuda", topology.rank % topology.ranks_per_node)
        torch.cuda.set_device(device)
    groups = connect(topology, init_method=init_method, device=device)
    if topology.tp_size == 1:
        return groups, Lockstep(topology)
    if topology.nnodes == 1:
        return groups, Lockstep(topology, SharedExchange(folder / "steps", topology.rank, topology.tp_size))
    return groups, Lockstep(topology, GroupExchange(groups.world))
