"""Which attention backend a cache group gets: the first of turnout/registry.py that takes it. Torch-free.

--attention-backend names another. Where none takes a group, the plan is refused before weights load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnout.attention.capability import AUTO, AttentionBackend, Chosen, Obstacle, Place, StateKernels
from turnout.attention.kinds import AttentionSpec, CacheGroup, DeltaNetSpec
from turnout.errors import Refusal
from turnout.registry import ATTENTION_BACKENDS
from turnout.vocabulary import AttentionKind


def backends() -> list[AttentionBackend]:
    """What they declare, in the order of the registry."""
    return [ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS]


def _asked(place: Place, *, for_states: bool = False) -> AttentionBackend | None:
    """What --attention-backend names, if recurrent layers are all that it computes, or if not; None:
    whichever takes a layer."""
    backend = ATTENTION_BACKENDS.get(place.asked) if place.asked in ATTENTION_BACKENDS else None
    return backend if backend and _is_for_states(backend) == for_states else None


def _is_for_states(backend: AttentionBackend) -> bool:
    """Whether recurrent layers are all that it computes."""
    return set(backend.implementations) == {AttentionKind.RECURRENT}


def choose(spec: AttentionSpec, place: Place) -> Chosen | None:
    """What computes such layers; None if nothing does, or not what was asked for."""
    asked = _asked(place)
    main = asked and (asked.prompts_for or asked.name)
    for backend in backends():
        if backend.prompts_for or (main and main != backend.name) or backend.limits(spec, place):
            continue
        others = [
            b
            for b in backends()
            if b.prompts_for == backend.name and not _is_for_states(b) and asked in (None, b)
        ]
        return _with_prompts(backend, others, spec, place)
    return None


def _with_prompts(
    backend: AttentionBackend, others: Sequence[AttentionBackend], spec: AttentionSpec, place: Place
) -> Chosen | None:
    """`backend`, with one of `others` for prompts: if it is asked for, or where it is faster."""
    own = Chosen(backend=backend.name, prompts=backend.name)
    for other in others:
        limits = other.limits(spec, place)
        if place.asked == other.name:
            return None if limits else replace(own, prompts=other.name)
        least = None if backend.own_prompts(spec, place) else other.pays_from(spec, place)
        if least is None or spec.kind not in other.implementations:
            continue
        if limits:
            why = f"{other.name} is faster for prompts of {least} tokens or more, but {', '.join(limits)}"
            return replace(own, why=why)
        return replace(own, prompts=other.name, prompt_tokens=least, why="faster from there on, as measured")
    return own


def refusals(groups: Sequence[CacheGroup], place: Place) -> list[Refusal]:
    """Why layers of these groups can run on no backend, or not on the one that was asked for."""
    if place.asked not in (AUTO, *ATTENTION_BACKENDS):
        return [
            Refusal(
                who="attention",
                asked=f"--attention-backend {place.asked}",
                limit="there is no such backend",
                remedy=f"use one of {', '.join((AUTO, *ATTENTION_BACKENDS))}",
            )
        ]
    asked = _asked(place)
    tried = [b for b in backends() if asked is None or b.name in (asked.name, asked.prompts_for)]
    found = []
    for group in groups:
        spec = group.spec
        if choose(spec, place):
            continue
        obstacles = {backend.name: backend.obstacles(spec, place) for backend in tried}
        remedies = dict.fromkeys(o.remedy for each in obstacles.values() for o in each)
        found.append(
            Refusal(
                who="attention",
                asked=("" if asked is None else f"--attention-backend {asked.name}, ")
                + f"layer {group.layers[0]}: {spec.kind}, heads of {spec.head_dim} and {spec.value_dim}, "
                f"on {place.device} in {place.dtype}",
                limit="; ".join(
                    f"{name} {', '.join(o.limit for o in each)}" for name, each in obstacles.items() if each
                ),
                remedy="use --dtype, --page-size or --device that one of them takes, or another model"
                if asked is None
                else f"use --attention-backend auto, or {', and '.join(remedies)}",
            )
        )
    return found


def choose_states(spec: DeltaNetSpec, place: Place) -> tuple[Chosen, StateKernels]:
    """The first backend that has something for the states of such layers, with what it has, and what takes
    prompts for it: itself or a library. Torch takes all layers.

    --attention-backend counts only for the library: any may take prompts, that one, or none.
    """
    found = ((backend, backend.states_of(spec, place)) for backend in backends())
    main, kernels = next((backend, kernels) for backend, kernels in found if kernels)
    others = [b for b in backends() if b.prompts_for == main.name and _is_for_states(b)]
    others = [b for b in others if place.asked in (AUTO, b.name)]
    chosen = _with_prompts(main, others, spec, place)
    return chosen or Chosen(backend=main.name, prompts=main.name), kernels


def state_refusals(specs: Sequence[DeltaNetSpec], place: Place) -> list[Refusal]:
    """Why the library that --attention-backend names takes no prompts through these recurrent layers."""
    library = _asked(place, for_states=True)
    if library is None or (specs and all(choose_states(s, place)[0].prompts == library.name for s in specs)):
        return []
    obstacles = [obstacle for spec in specs[:1] for obstacle in library.obstacles(spec, place)]
    if not specs:
        obstacles = [Obstacle("computes recurrent layers only, and the model has none", "")]
    elif not obstacles:
        other = library.prompts_for
        obstacles = [
            Obstacle(f"takes prompts for {other}, which does not take the states of these layers", "")
        ]
    remedies = [f", or {obstacle.remedy}" for obstacle in obstacles if obstacle.remedy]
    return [
        Refusal(
            who="attention",
            asked=f"--attention-backend {library.name}",
            limit=f"{library.name} {', '.join(obstacle.limit for obstacle in obstacles)}",
            remedy="use --attention-backend auto" + "".join(remedies),
        )
    ]
