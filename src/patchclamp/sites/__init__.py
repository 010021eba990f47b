"""Site tables, one per model family, with both engines side by side, and the site map of a live model."""

from patchclamp.sites.map import (
    LENS,
    Dictionary,
    Point,
    Shard,
    SiteMap,
    SiteRef,
    Sizes,
    View,
    layer_kinds,
    placed,
    sizes_of,
)
from patchclamp.sites.tables import FAMILIES, Family, Tap, family_of, has_table

__all__ = [
    "FAMILIES", "LENS", "Dictionary", "Family", "Point", "Shard", "SiteMap", "SiteRef", "Sizes", "Tap", "View",
    "family_of", "has_table", "layer_kinds", "placed", "sizes_of",
]  # fmt: skip
