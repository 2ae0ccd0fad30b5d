"""A space of calls: axes with their values, and rules for values that do not go together.

Point `n` begins with pair `n` of the list of all possible pairs, the rarest first, and draws its
other axes at random. So a point follows from its number alone, and a few thousand points hold every
pair of values that one call can have.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

# How often a point leaves an option at its first value, besides the times that it draws it: calls
# with one option alone, with some, and with all of them.
CALM = (0.9, 0.6, 0.3, 0.0)


@dataclass(frozen=True)
class Rule:
    axes: tuple[str, ...]
    forbids: Callable[..., bool]  # of one value for each axis

    def broken(self, point):
        """A point that has not all of the axes yet breaks no rule."""
        if any(axis not in point for axis in self.axes):
            return False
        return self.forbids(*(point[axis] for axis in self.axes))


@dataclass(frozen=True)
class Space:
    axes: dict[str, tuple]  # the first value of an option: not used
    rules: tuple[Rule, ...]
    always_drawn: tuple[str, ...]  # the first of these decides which others there are

    @cached_property
    def _rules_of(self):
        return {axis: [rule for rule in self.rules if axis in rule.axes] for axis in self.axes}

    def allows(self, point):
        return not any(rule.broken(point) for rule in self.rules)

    def fitting(self, axis, point):
        """The values of an axis that a point may take."""
        rules = self._rules_of[axis]

        def fits(value):
            own = {**point, axis: value}
            return not any(rule.broken(own) for rule in rules)

        return [value for value in self.axes[axis] if fits(value)]

    @cached_property
    def pairs(self):
        """((axis, value), (axis, value)) that some point has, the rarest first."""
        first = self.always_drawn[0]
        chances = {}
        labels = [[(axis, value) for value in values] for axis, values in self.axes.items()]
        for of_one, of_other in combinations(labels, 2):
            for pair in product(of_one, of_other):
                point = dict(pair)
                open_ways = len(self.fitting(first, point)) if self.allows(point) else 0
                if open_ways:
                    chances[pair] = open_ways * self._chance(*pair[0]) * self._chance(*pair[1])
        return sorted(chances, key=chances.get)

    def _chance(self, axis, value):
        values = self.axes[axis]
        calm = 0 if axis in self.always_drawn else sum(CALM) / len(CALM)
        return (1 - calm) / len(values) + calm * (value == values[0])

    def point(self, n):
        """axis -> value."""
        source = random.Random(n)
        point = dict(self.pairs[n % len(self.pairs)])
        calm = source.choice(CALM)
        for axis in self.axes:
            if axis not in point:
                values = self.fitting(axis, point)
                is_left = axis not in self.always_drawn and source.random() < calm
                point[axis] = values[0] if is_left else source.choice(values)
        return {axis: point[axis] for axis in self.axes}

    def simpler(self, point):
        """The points that differ by one axis, which has its first value."""
        for axis, values in self.axes.items():
            candidate = {**point, axis: values[0]}
            if candidate != point and self.allows(candidate):
                yield candidate


def pairs_of(points):
    """Every pair of values that one of the points has."""
    return {pair for point in points for pair in combinations(point.items(), 2)}
