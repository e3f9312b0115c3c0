"""tile_rows: wide values of many rows are made and used one tile of rows after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from glue_compiler import compat
from glue_compiler.graph_pass import Numerics, PairPass, PassContext, PassResult, Skip
from glue_compiler.passes.tile_rows.regions import Region, find_regions, numbers_of_rows
from glue_compiler.passes.tile_rows.write import tile

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair


LEAST_ROWS = 1024
"""Of a tile: fewer leave much of a GPU idle."""

MOST_TILES = 8
"""Of a region: what is alive inside is then no more than what goes in and out."""

GRAIN = 256
"""Sizes of tiles are multiples of it."""


_PROMISED = (
    "one graph has to serve a range of sizes that was asked for with mark_dynamic, and tiles are compiled for a part "
    "of it; without mark_dynamic torch compiles once more for others"
)


class TileRows(PairPass):
    """Do what is wider inside than at its ends, as an MLP is, tile by tile of rows, so that less is alive at a time.

    Counts: ``regions`` found, ``tiles`` they are done in, ``steps`` of each.
    """

    name: ClassVar[str] = "tile_rows"
    numerics: ClassVar[Numerics] = Numerics.CLOSE
    default: ClassVar[bool] = False

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        counts = {"regions": 0, "tiles": 0, "steps": 0}
        skips: list[Skip] = []
        promised = compat.promised_symbols(context.shape_env)
        for gm, where in ((pair.forward, "forward"), (pair.backward, "backward")):
            rows = numbers_of_rows(gm.graph, 2 * LEAST_ROWS)
            for each in [each for each in rows if promised & getattr(each, "free_symbols", frozenset())]:
                del rows[each]
                skips.append(Skip(f"in {where}, {_PROMISED}"))
            refused: set[fx.Node] = set()
            regions = find_regions(gm.graph, rows)
            skips += [Skip(f"in {where}, {reason}", node.name) for node, reason in regions.left]
            while regions.found:
                for region in regions.found:
                    if not context.fuel.take(f"tile {len(region.nodes)} steps of {where}"):
                        refused.update(region.nodes)
                        continue
                    tiles = _tiles(region)
                    tile(gm.graph, region, tiles, GRAIN)
                    counts["regions"] += 1
                    counts["tiles"] += tiles
                    counts["steps"] += len(region.nodes)
                regions = find_regions(gm.graph, rows, refused)
            gm.recompile()
        return PassResult(changed=counts["regions"] > 0, counts=counts, skips=tuple(skips))


def _tiles(region: Region) -> int:
    return min(MOST_TILES, region.rows // LEAST_ROWS) if isinstance(region.rows, int) else MOST_TILES
