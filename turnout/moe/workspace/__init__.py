"""What runners need beside their weights: from a rank's `Share` of a layer to bytes, a file a runner.

Declarations name them (backends.py), plans count them. No torch here.
"""
