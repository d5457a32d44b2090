"""What backends declare, and in which words. No torch here; nothing in this folder knows a backend.

capability  what a runner and what a dispatcher declare: formats, layouts, devices, formulas of memory
limits      which ranks and sizes the kernels of a dispatcher take
packages    what must be installed
cost        how long it takes to bring tokens to their experts and back
rank_share  one rank's part of a layer, for formulas of memory
tuning      tables that were measured for a runner's kernels
declared    all runners and dispatchers of this version, by name
"""
