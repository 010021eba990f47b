"""Activations of a data set on disk: `harvest` writes them, `Harvested` reads them. docs/harvest.md has the format."""

from patchclamp.studies.harvest.filters import Filters
from patchclamp.studies.harvest.reader import Harvested
from patchclamp.studies.harvest.reduce import Project
from patchclamp.studies.harvest.study import Harvest, harvest

__all__ = ["Filters", "Harvest", "Harvested", "Project", "harvest"]
