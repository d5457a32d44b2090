"""Quantiles as Prometheus takes them; vendored files as they were published."""

from __future__ import annotations

import hashlib
import math
import random

import pytest

from tools.vendor_uplot import FILES, FOLDER
from turnout.server.dashboard.snapshot import quantile
from turnout.server.metric_list import SECONDS


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99])
def test_a_quantile_lies_in_the_bucket_of_the_true_one(q: float):
    draw = random.Random(3)
    seen = sorted(draw.expovariate(20) for _ in range(999))
    bounds = [*SECONDS, math.inf]
    buckets = [(bound, float(sum(value <= bound for value in seen))) for bound in bounds]
    true = seen[math.ceil(q * len(seen)) - 1]
    above = next(bound for bound in bounds if bound >= true)
    below = max([0.0, *(bound for bound in bounds if bound < true)])
    assert below <= quantile(buckets, q) <= above


def test_quantiles_at_the_ends():
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None
    assert quantile([(1.0, 0.0), (2.0, 4.0), (math.inf, 4.0)], 0.5) == 1.5
    assert quantile([(1.0, 0.0), (2.0, 0.0), (math.inf, 4.0)], 0.5) == 2.0  # beyond all bounds


def test_vendored_files_are_those_of_the_package():
    for name, digest in FILES.values():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert {file.name for file in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
