"""How a plan is found (moe/plan.py): every combination of backends for a layer, what stands against each, and
what decides between those that are left. No torch here.

    case        the question: layer, ranks, device, bounds, wishes
    candidates  all combinations, joined by what backends declare (moe/backends/declarations.py,
    moe/planning/capability.py) division    how experts and their shards divide among ranks pairing     what
    runner and dispatcher must agree on limits      what a dispatcher's kernels were made for packages    what
    must be installed cost        which way a large prompt travels measured    what `turnout tune` found, on
    disk buckets     two runners in turn, where each was measured faster at some batch sizes reasons     why a
    plan is as it is, in words proven      on which hardware backends have run
"""
