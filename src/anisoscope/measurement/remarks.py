"""What a reader of the numbers should know of the rows behind them: those that were lost, and those that are zero."""

from __future__ import annotations

from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.measurement.bank import Bank, SiteStats
from anisoscope.measurement.selection import energy_per_row
from anisoscope.metrics.engine.metric import WEIGHT_KINDS

_HANDED_ON = ("resid", "stage")  # what one block or stage gives to the next


def remarks(bank: Bank) -> list[str]:
    """Notes on rows with NaN or infinity, and on layers that give nothing but zeros."""
    return [*left_out(bank), *dead_layers(bank)]


def left_out(bank: Bank) -> list[str]:
    """A note where rows with NaN or infinity were left out."""
    bad = {site: stats.non_finite for site, stats in bank.sites.items() if stats.non_finite}
    if not bad:
        return []
    worst = max(bad, key=lambda site: bad[site])
    stats = bank.sites[worst]
    contexts = sum(stats.contexts.values())
    lost = f"{bad[worst]} of {bad[worst] + rows_seen(stats)} rows of {contexts} context{'s' * (contexts != 1)}"
    more = f", and some at {len(bad) - 1} more site{'s' * (len(bad) != 2)}" if len(bad) > 1 else ""
    return [f"{lost} were not finite (NaN or infinity) and were left out at {worst}{more}"]


def dead_layers(bank: Bank) -> list[str]:
    """A note where every row is exactly zero from some block or stage of a stack on."""
    found = []
    for stack in dict.fromkeys(site.stack for site in bank.sites):
        for kind in _HANDED_ON:
            sites = sorted((s for s in bank.sites if (s.stack, s.kind) == (stack, kind)), key=flow_order)
            if first := _first_dead(bank, sites):
                where = f"{'block' if kind == 'resid' else 'stage'} {first} of {len(sites)}"
                whose = "" if stack == "single" else f" of the {stack}"
                found.append(f"outputs{whose} are exactly zero from {where} on: nothing of the input gets past it")
    return found


def _first_dead(bank: Bank, sites: list[Site]) -> int:
    """The number, from 1 on, of the first site from which on every row is zero; 0 where the last one lives."""
    alive = [number for number, site in enumerate(sites, 1) if not _is_zero(bank.sites[site])]
    first = max(alive, default=0) + 1
    return first if first <= len(sites) else 0


def _is_zero(stats: SiteStats) -> bool:
    energies = [energy_per_row(stats, part) for part in ("first", "rest")]
    known = [energy for energy in energies if energy == energy]  # NaN: no row of that part
    return bool(known) and not any(known)


def rows_read(bank: Bank) -> int:
    """Rows of the site that saw most of what the model reads: not of a decoder beside it, nor of tables of weights."""
    whole = [(site, stats) for site, stats in bank.sites.items() if not stats.heads] or list(bank.sites.items())
    own = [stats for site, stats in whole if site.stack != "decoder" and site.kind not in WEIGHT_KINDS]
    return max(map(rows_seen, own or [stats for _, stats in whole]), default=0)


def rows_seen(stats: SiteStats) -> int:
    """Finite rows that a site saw."""
    return sum(max((stat.n for stat in kinds.values()), default=0) for kinds in stats.cells.values())
