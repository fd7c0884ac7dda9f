"""Chooses the best clusters among many that share nodes: a set-packing problem, solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.planning.cost import Floats
from roost.planning.groups import Group
from roost.planning.partitions import Bounds

RELATIVE_GAP = 1e-4
"""A choice this near to the best possible one is taken."""
NODE_LIMIT = 200
"""Branches that the solver may look at: a fixed amount of work, the same on every machine."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The groups to choose from, each with its value."""

    nodes: int
    groups: Sequence[Group]
    values: Sequence[float]
    bounds: Bounds

    def choose(self) -> list[Group] | None:
        """Return disjoint groups with the highest total value, within the bounds on their number; None if none was found."""
        # Imported here: it takes a third of a second, which small pools need not wait for.
        from scipy.optimize import Bounds as Box
        from scipy.optimize import LinearConstraint, milp

        rows, limits = self._rows()
        found = milp(
            -np.asarray(self.values),
            constraints=LinearConstraint(rows, ub=limits),
            integrality=np.ones(len(self.groups)),
            bounds=Box(0, 1),
            options={"mip_rel_gap": RELATIVE_GAP, "node_limit": NODE_LIMIT},
        )
        if found.x is None:
            return None
        return [group for group, taken in zip(self.groups, found.x, strict=True) if taken > 0.5]

    def _rows(self) -> tuple[object, Floats]:
        """Return the constraints rows @ x <= limits: one of each node, and the number of groups."""
        from scipy.sparse import csc_array

        count = len(self.groups)
        rows = [place for group in self.groups for place in sorted(group)]
        columns = [index for index, group in enumerate(self.groups) for _ in group]
        signs = [1.0] * len(rows)
        limits = [1.0] * self.nodes
        for bound, sign in ((self.bounds.most, 1.0), (self.bounds.least if self.bounds.least > 1 else 0, -1.0)):
            if bound:
                rows += [len(limits)] * count
                columns += range(count)
                signs += [sign] * count
                limits.append(sign * bound)
        return csc_array((signs, (rows, columns)), shape=(len(limits), count)), np.asarray(limits)
