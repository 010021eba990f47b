"""WHERE: one table a model family, Transformers and vLLM side by side; the map of a live model; the prover."""

from patchclamp.sites.families import Family, Sizes, Tap, sizes_of
from patchclamp.sites.map import Piece, Place, Point, SiteMap, View
from patchclamp.sites.tables import FAMILIES, family_of, has_table

__all__ = ["FAMILIES", "Family", "Piece", "Place", "Point", "SiteMap", "Sizes", "Tap", "View", "family_of",
           "has_table", "sizes_of"]  # fmt: skip
