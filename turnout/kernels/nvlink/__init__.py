"""Tokens to the ranks that hold their experts and results back, by stores into peers' memory (Triton).

Two launches a layer, no collective, no host. Every rank has the same region of symmetric memory
(parallel/symmetric.py) and knows the address of everyone's:

    counts    int64 [2, R]           epoch << 24 | tokens of source s
    meta      int32 [2, rows, 2 k]   ids + 2, then weights, of a row
    arrived   int64 [rows]           epoch
    hidden    bytes [rows, .]        a token in its wire format; scales: [rows, .]
    landing   bytes [few rows, .]    the same, values and then scales
    returned  int64 [rows]           epoch
    results   [rows, H]              a token's result from rank r, or bytes in FP8: values, then scales
    landed    [few rows, H]          the same

Token t of source s is row `t R + s` on every rank that holds one of its experts, and its result from rank r
comes back into row `t R + r` of s. No one allocates slots, so there are no atomics to race for them and no
sums over ranks, and the rows of a batch are a prefix of the buffer whatever its size: ranks may run graphs
of different batch sizes. What a rank has for itself it never sends.

There are two ways to know that something has arrived, and a source's tokens and results all use the same one:

* Up to `few` tokens, in words. A word of 32 bits that is not zero has arrived: it is its own flag, and no
  fence is paid for. Two zeros of bfloat16 are sent as (0, -0), and the last of four zeros in FP8, of eight in
  NVFP4, as -0. Receivers poll what they copy or add up anyway, and leave zeros for the next exchange.
* More tokens, by flags. A row is stored where it is to be read, and then a flag released, for whose fence all
  stores before it have to be acknowledged. Ids and weights are words even then.

Results may come back in FP8 (combine_fp8.py), if asked to. They are summed in float32, in the order of
ranks: the same bits every time. Sums of early tokens overlap with the stores of later ones: a program that
has sent the results of token t waits for its own token a turn before, LAG programs' worth; who waits for t
has sent all up to t, so the smallest t that is waited for is on its way.

Why no barrier keeps a buffer from being overwritten too early: a rank leaves dispatch e when all ranks have
begun theirs, so they have left combine e - 1. Counts and meta of e lie in one half, those of e + 1 in the
other; meta is zeroed by combine e, before dispatch e + 1 begins, before anyone can begin e + 2. A row is
written again after its result came back, hence was used, and its words zeroed by the launch before; one that
no rank wanted here is neither written nor read. A result is written again after its owner has begun the next
dispatch, its words zeroed. That holds as long as each dispatch is followed by its combine before the next on
the same region: batches in flight together need a region each.

Epochs live on the device: `epochs[0]` is the last that was combined, `epochs[1]` the one in flight. Each
kernel writes the one that it does not read, so graphs replay without anyone counting.

A program pushes before it waits, and no more programs are launched than fit on the device together: none
waits for another that cannot start. A wait that lasts longer than `limit` leaves a word in `failed` and,
where the host sees it, in `told` (waiting.py), and gives up; so do all later ones at once.
"""
