"""WHERE: one table a model family, Transformers and vLLM side by side; the map of a live model; the prover."""

from patchclamp.sites.families import FAMILIES, Family, Tap, family_of
from patchclamp.sites.map import Place, Point, SiteMap

__all__ = ["FAMILIES", "Family", "Place", "Point", "SiteMap", "Tap", "family_of"]
