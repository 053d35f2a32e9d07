"""All default metrics of one array together, beside the dearest of them alone: they share their statistics."""

from __future__ import annotations

from alone import Way, timed
from bench import Bench, Entry, Table, size
from torch import Tensor


def together(x: Tensor) -> dict[str, float]:
    """Seconds of the whole set and of each metric alone, in turns in one process."""
    from anisoscope.metrics.catalogue import measure_rows, registry
    from anisoscope.metrics.engine.metric import STREAM_KINDS

    chosen = [m for m in registry().values() if m.default and m.kinds & STREAM_KINDS]
    measure_rows(x[:512])
    found = {"all": timed(lambda: measure_rows(x), x.device.type)[1]}
    for metric in chosen:
        try:
            found[metric.name] = timed(lambda metric=metric: metric(x), x.device.type)[1]
        except Exception as error:  # one that plain rows have no answer for, such as a metric of tokens
            print(metric.name, error)
    return found


WAYS = {"together": Way(together, "all default metrics, and each alone")}


def run(bench: Bench) -> Entry:
    entry = Entry("All default metrics together", __doc__ or "")
    for n in (4096, 20_000):
        source = bench.cloud(n, 768)
        found = bench.time("all_metrics", "together", source, once=True)
        if found.missing:
            entry.about += f" ({found.missing})"
            return entry
        whole, alone = found.result["all"], {k: v for k, v in found.result.items() if k != "all"}
        table = Table(size(source), columns=("metric", "seconds", "of the whole set"))
        table.rows = [{"metric": "the whole set", "seconds": whole, "of the whole set": 1.0}]
        for name, seconds in sorted(alone.items(), key=lambda pair: -pair[1]):
            table.rows.append({"metric": name, "seconds": seconds, "of the whole set": seconds / whole})
        entry.tables.append(table)
        entry.check(f"the whole set over its dearest metric, {size(source)}", whole / max(alone.values()), most=1.3)
    return entry
