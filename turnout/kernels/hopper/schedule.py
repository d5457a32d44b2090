"""Which tile a program of specialised warps takes next, and how its warps tell one another (Gluon).

Legend: R sorted rows (token, expert), N weight rows, E local experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the parity of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, FILLS: gl.constexpr, TAKES: gl.constexpr):
    """Those that tell of each stage that it is full, by FILLS arrivals, and that it is empty, by TAKES."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FILLS)
        mbarrier.init(empty.index(i), count=TAKES)
    return full, empty


@gluon.jit
def tile_at(place, tiles_ptr, n_tiles, num_tiles, GROUP: gl.constexpr):
    """`locate`, sorted, for a place that exists, below n_tiles * num_tiles."""
    group = place // (n_tiles * GROUP)
    size = gl.minimum(num_tiles - group * GROUP, GROUP)
    rest = place - group * n_tiles * GROUP
    tile = group * GROUP + rest % size
    n = rest // size
    entry = tiles_ptr + 4 + tile * 4
    expert = gl.load(entry)
    row = gl.load(entry + 1)
    end = gl.load(entry + 2)
    return expert, n, row, end


@gluon.jit
def draw(tiles_ptr, SECOND: gl.constexpr):
    """A place that no program has; it begins with the place of its number. SECOND: which GEMM's counter."""
    return gl.num_programs(0) + gl.atomic_add(tiles_ptr + (3 if SECOND else 2), 1, sem="relaxed")


@gluon.jit
def publish(drawn, stage, expert, n, row, end):
    """Loading warps tell others, who wait for `stage`, which tile begins there. drawn: see `drawn_memory`."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 4, FOUR)
    drawn.index(stage).store(gl.where(i < 2, gl.where(i < 1, expert, n), gl.where(i < 3, row, end)))
    gl.thread_barrier()


@gluon.jit
def published(drawn, stage):
    """Expert, tile of weight rows, first row and end of what `publish` told of `stage`."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    LEAST: gl.constexpr = -(2**31)
    told = drawn.index(stage).load(FOUR)
    i = gl.arange(0, 4, FOUR)
    expert = gl.max(gl.where(i == 0, told, LEAST), 0)
    n = gl.max(gl.where(i == 1, told, LEAST), 0)
    row = gl.max(gl.where(i == 2, told, LEAST), 0)
    end = gl.max(gl.where(i == 3, told, LEAST), 0)
    return expert, n, row, end


@gluon.jit
def drawn_memory(STAGES: gl.constexpr):
    """What `publish` writes to, int32 [STAGES, 4]."""
    return gl.allocate_shared_memory(gl.int32, [STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
