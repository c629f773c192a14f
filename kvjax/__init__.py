"""kvjax: offload paged KV-cache blocks of models whose layers form mixed groups."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import checkpoints as checkpoints
    from kvjax import fused as fused
    from kvjax import law as law
    from kvjax import pool as pool
    from kvjax import ranks as ranks
    from kvjax import tiers as tiers
    from kvjax import traced as traced
    from kvjax.chunking import Chunking as Chunking
    from kvjax.chunking import resolve_chunking as resolve_chunking
    from kvjax.configs import layout_from_config as layout_from_config
    from kvjax.coverage import Hit as Hit
    from kvjax.coverage import longest_hit as longest_hit
    from kvjax.coverage import next_cut as next_cut
    from kvjax.coverage import restorable as restorable
    from kvjax.coverage import store_set as store_set
    from kvjax.decision import Decision as Decision
    from kvjax.explain import explain_hit as explain_hit
    from kvjax.groups import CacheLayout as CacheLayout
    from kvjax.groups import ChunkedLocal as ChunkedLocal
    from kvjax.groups import FullAttention as FullAttention
    from kvjax.groups import GroupSpec as GroupSpec
    from kvjax.groups import LeafSpec as LeafSpec
    from kvjax.groups import Recurrent as Recurrent
    from kvjax.groups import Scratch as Scratch
    from kvjax.groups import SlidingWindow as SlidingWindow
    from kvjax.handles import Lookup as Lookup
    from kvjax.jobs import Job as Job
    from kvjax.jobs import JobResult as JobResult
    from kvjax.ledger import Ledger as Ledger
    from kvjax.mover import Mover as Mover
    from kvjax.observe.events import JSONLinesEvents as JSONLinesEvents
    from kvjax.observe.events import KVEvent as KVEvent
    from kvjax.observe.metrics import register_metrics as register_metrics
    from kvjax.offloader import Offloader as Offloader
    from kvjax.plan import LoadPlan as LoadPlan
    from kvjax.plan import StorePlan as StorePlan
    from kvjax.plan import plan_load as plan_load
    from kvjax.plan import plan_store as plan_store
    from kvjax.positions import Restorable as Restorable
    from kvjax.ranks import RankedOffloader as RankedOffloader
    from kvjax.retention import retained_from as retained_from
    from kvjax.stats import GroupStats as GroupStats
    from kvjax.stats import Stats as Stats
    from kvjax.stats import TierStats as TierStats

__version__ = "0.1.0"

# Names are imported when first used: what moves bytes needs JAX, which a scheduler that only plans does not, and the
# command line must say something sensible of an interrupt while it starts.
_MODULES = ("checkpoints", "fused", "law", "pool", "ranks", "tiers", "traced")
_FROM = {
    "CacheLayout": "kvjax.groups",
    "ChunkedLocal": "kvjax.groups",
    "Chunking": "kvjax.chunking",
    "Decision": "kvjax.decision",
    "FullAttention": "kvjax.groups",
    "GroupSpec": "kvjax.groups",
    "GroupStats": "kvjax.stats",
    "Hit": "kvjax.coverage",
    "JSONLinesEvents": "kvjax.observe.events",
    "Job": "kvjax.jobs",
    "JobResult": "kvjax.jobs",
    "KVEvent": "kvjax.observe.events",
    "LeafSpec": "kvjax.groups",
    "Ledger": "kvjax.ledger",
    "LoadPlan": "kvjax.plan",
    "Lookup": "kvjax.handles",
    "Mover": "kvjax.mover",
    "Offloader": "kvjax.offloader",
    "RankedOffloader": "kvjax.ranks",
    "Recurrent": "kvjax.groups",
    "Restorable": "kvjax.positions",
    "Scratch": "kvjax.groups",
    "SlidingWindow": "kvjax.groups",
    "Stats": "kvjax.stats",
    "StorePlan": "kvjax.plan",
    "TierStats": "kvjax.stats",
    "explain_hit": "kvjax.explain",
    "layout_from_config": "kvjax.configs",
    "longest_hit": "kvjax.coverage",
    "next_cut": "kvjax.coverage",
    "plan_load": "kvjax.plan",
    "plan_store": "kvjax.plan",
    "register_metrics": "kvjax.observe.metrics",
    "resolve_chunking": "kvjax.chunking",
    "restorable": "kvjax.coverage",
    "retained_from": "kvjax.retention",
    "store_set": "kvjax.coverage",
}

__all__ = [
    "CacheLayout",
    "ChunkedLocal",
    "Chunking",
    "Decision",
    "FullAttention",
    "GroupSpec",
    "GroupStats",
    "Hit",
    "JSONLinesEvents",
    "Job",
    "JobResult",
    "KVEvent",
    "LeafSpec",
    "Ledger",
    "LoadPlan",
    "Lookup",
    "Mover",
    "Offloader",
    "RankedOffloader",
    "Recurrent",
    "Restorable",
    "Scratch",
    "SlidingWindow",
    "Stats",
    "StorePlan",
    "TierStats",
    "explain_hit",
    "layout_from_config",
    "longest_hit",
    "next_cut",
    "plan_load",
    "plan_store",
    "register_metrics",
    "resolve_chunking",
    "restorable",
    "retained_from",
    "store_set",
]


if not TYPE_CHECKING:  # to which every name would be there, and be anything

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"kvjax.{name}")
        module = _FROM.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(module), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, *_MODULES})
