"""How a plan is found (moe/plan.py): every combination of backends for a layer, why it is refused, and what
decides between those that are left. No torch here, and no backend by name.

    problem               the question: layer, ranks, device, bounds, what the user asked for
    choices               what request and checkpoint leave each backend to choose from
    candidates            all combinations, joined by what backends declare (moe/capabilities)
    backend_refusals      what one backend by itself cannot do
    compatibility         what runner and dispatcher must agree on
    sharding_rules        how experts and their shards divide among ranks
    measured              what `turnout tune` found, on disk
    runner_by_batch_size  two runners, each for the batch sizes at which it was measured faster
    reasons               why a plan is as it is, in words
    hardware_evidence     on which hardware backends have run
"""
