"""The engine's load as a response header for load balancers: Open Request Cost Aggregation (ORCA).

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..requests.engine_metrics import EngineMetrics

FORMAT_HEADER = "endpoint-load-metrics-format"  # request header


def load_headers(form: str, metrics: EngineMetrics) -> Mapping[str, str]:
    """Return the load header, with vLLM's metric names; empty unless `form` is TEXT or JSON."""
    load = {"kv_cache_usage_perc": metrics.kv_use, "num_requests_waiting": float(metrics.progress.num_waiting)}
    reports = {
        "TEXT": ", ".join(f"named_metrics.{name}={value}" for name, value in load.items()),
        "JSON": json.dumps({"named_metrics": load}),
    }
    report = reports.get(form.upper())
    return {} if report is None else {"endpoint-load-metrics": f"{form.upper()} {report}"}
