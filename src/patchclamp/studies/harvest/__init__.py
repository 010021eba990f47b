"""Activations of a data set on disk: `harvest` writes them, `Harvested` reads them. docs/harvest.md has the format."""

from patchclamp.studies.harvest.plan import Filters
from patchclamp.studies.harvest.reader import Harvested
from patchclamp.studies.harvest.study import Harvest, Project, harvest

__all__ = ["Filters", "Harvest", "Harvested", "Project", "harvest"]
