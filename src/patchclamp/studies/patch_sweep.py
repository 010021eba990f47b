"""The patch sweep: where in the model is the information that distinguishes a clean prompt from a corrupt one?

Denoising runs the corrupt prompt many times, each time with one cell (a site, a layer, a position) replaced by its
value in a run of the clean prompt. If that restores the clean answer, the cell carries the difference. Noising does the
reverse: cells of the corrupt run are patched into the clean one, and the answer suffers where it needs them.

Source: activation patching as in causal tracing, Meng et al. 2022 (arXiv:2202.05262), section 2.1; both directions and
practice after Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from __future__ import annotations

from collections.abc import Callable

from patchclamp.errors import PatchclampError
from patchclamp.language.values import as_mask
from patchclamp.lm import LM
from patchclamp.studies import inputs
from patchclamp.studies.grid import GridPlan, PairGrid
from patchclamp.studies.sources import Mixing, as_source, check_widths
from patchclamp.studies.sweep_result import PatchSweepResult


class PatchSweep(PairGrid):
    """Patch every site, layer and token of a clean run into a corrupt one, and show where the answer comes back.

    Denoising runs the corrupt prompt with one cell of the clean run: if the answer comes back, the cell carries the
    difference. Noising runs the clean prompt with one cell of the corrupt run, and shows what the answer needs.

    Raises: `TokensError` for prompts that cannot be aligned, `ProgramError` for a wrong argument, and the error of any
    run.
    """

    command = "sweep"

    sites: inputs.Sites = ("resid_pre",)
    """Sites, optionally with indices of layers, heads, neurons or experts: resid_pre, attn_out, z, 'z[:, 3]'."""
    positions: inputs.Positions = None
    """Columns of the grid: selections of the patched prompt, such as -1 or span('Rome'), each patched as a whole. A
    mapping gives them labels; its values may be lists with one selection per pair. A Match (as text, JSON with clean,
    corrupt and align) pairs parts of different lengths. All aligned positions by default."""
    group: inputs.OptionalCount = None
    """Number of heads, neurons or experts per row: 1 gives each head a row; by default a row is the whole site."""
    window: inputs.Positive = 1
    """Number of adjacent layers patched together, centred on the cell's layer."""
    source: inputs.SourceField = None
    """Values to write instead of the other prompt's: zeros, bank:NAME, `studies.MeanOf(prompts)` or
    `studies.Resampled(prompts)`."""
    alpha: float = 1.0
    """Weight of the new value when it is mixed with the old one; 1 replaces the old value."""
    mask: inputs.MaskField = None
    """Columns of a row to patch: a mask [W], as in `pc.Replace`."""
    zoom: inputs.OptionalCount = None
    """Start with blocks of 8 layers × 8 positions and split this many of the best blocks of each size; cells that are
    not reached stay NaN."""

    def plan(self, lm: LM) -> GridPlan:
        cases = self.cases(lm, self.positions)
        rows = inputs.rows_of(lm, self.sites, self.layers, self.group, self.window)
        try:
            mixing = Mixing(inputs.as_float(self.alpha, "alpha"), None if self.mask is None else as_mask(self.mask))
        except PatchclampError as error:
            raise error if error.path else error.under("mask") from None
        source = None if self.source is None else as_source(self.source)
        check_widths(lm, rows, source, mixing)
        return GridPlan(lm, self, PatchSweepResult, cases, rows, direction=self.direction, source=source,
                        mixing=mixing, seed=self.seed, zoom=self.zoom)  # fmt: skip


patch_sweep: Callable[..., PatchSweepResult] = PatchSweep.short_form("patch_sweep")
