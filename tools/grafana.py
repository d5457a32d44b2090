"""The Grafana dashboard, docs/grafana.json: a row for each heading of the list of metrics, a panel for each.

Written by `python -m tools.generate_docs`.
"""

from __future__ import annotations

import json
from typing import Any

from turnout.server.metric_list import METRICS, Group, Kind, Metric

WIDTH, HEIGHT, COLUMNS = 8, 7, 3  # of a panel, in Grafana's grid of 24, and panels side by side
CHOSEN = 'model_name=~"$model", instance=~"$instance"'
QUANTILES = {"p50": 0.5, "p99": 0.99}
UNITS = {"seconds": "s", "bytes": "bytes"} | dict.fromkeys(("perc", "balancedness", "share"), "percentunit")
SOURCE = {"type": "prometheus", "uid": "${source}"}


def grafana() -> str:
    """The dashboard as JSON, to be imported into Grafana."""
    panels: list[dict[str, Any]] = []
    y = 0
    for group in Group:
        panels.append({"type": "row", "title": group, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        members = [metric for metric in METRICS if metric.group == group]
        for i, metric in enumerate(members):
            place = {"x": WIDTH * (i % COLUMNS), "y": y + HEIGHT * (i // COLUMNS), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(metric) | {"gridPos": place})
        y += HEIGHT * -(-len(members) // COLUMNS)
    for id, panel in enumerate(panels, start=1):
        panel["id"] = id
    board = {
        "title": "Turnout",
        "uid": "turnout",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [_source(), _variable("model", "model_name"), _variable("instance", "instance")]
        },
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def expressions(metric: Metric) -> dict[str, str]:
    """What a panel draws, by the name of the line. Servers are told apart, but for rates of whole servers and
    quantiles, which are those of all that are chosen."""
    name, rest = metric.series, metric.labels[1:]
    by = ", ".join(("instance", *rest) if rest else ("model_name",))
    told = ("model_name",) if metric.kind == Kind.COUNTER and not rest else ("instance", *rest)
    legend = ", ".join(f"{{{{{label}}}}}" for label in told)
    series = f"{name}{{{CHOSEN}}}"
    if metric.kind == Kind.HISTOGRAM:
        buckets = f"sum by (le) (rate({name}_bucket{{{CHOSEN}}}[$__rate_interval]))"
        return {key: f"histogram_quantile({q}, {buckets})" for key, q in QUANTILES.items()}
    if metric.kind == Kind.COUNTER:
        return {legend: f"sum by ({by}) (rate({series}[$__rate_interval]))"}
    return {legend: series}


def _panel(metric: Metric) -> dict[str, Any]:
    words = set(metric.name.split("_"))
    unit = next((unit for word, unit in UNITS.items() if word in words), "short")
    per_second = metric.kind == Kind.COUNTER
    return {
        "type": "timeseries",
        "title": metric.name.removesuffix("_total").replace("_", " ") + (" per second" if per_second else ""),
        "description": metric.help,
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(expressions(metric).items())
        ],
        "fieldConfig": {
            "defaults": {"unit": "percentunit" if per_second and unit == "s" else unit, "min": 0}
        },
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({METRICS[0].series}, {label})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
