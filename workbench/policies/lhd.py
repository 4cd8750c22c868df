"""LHD, least hit density (Beckmann, Chen and Cidon, NSDI 2018)."""

import math

from workbench.policies.base import policy
from workbench.policies.pool import Pool

__all__ = ["Lhd"]

CLASSES = 8  # by the age at the last hit, a chunk never hit apart
AGES = 128  # four to each doubling


@policy
class Lhd(Pool):
    """Of some chunks drawn at random, evicts the one expected to give the fewest hits for the space-time it takes.

    What to expect is learned for each class and age from the ages at which chunks were hit and evicted. Ages are
    counted in accesses and grow coarser with age, where the paper rescales even steps.
    """

    fields = dict(Pool.fields, touched="i8", kind="u1")
    table = dict(Pool.table, hit="f8", gone="f8", density="f8")
    table_min = CLASSES * AGES
    scalars = dict(Pool.scalars, samples=32, clock=0, learned=0, decay=0.9)

    def on_hit(self, c):
        age = self.age(c)
        self.hit[self.kind[c] * AGES + age] += 1.0
        self.kind[c] = 1 + min(CLASSES - 2, age * (CLASSES - 1) // AGES)
        self.tick(c)

    def on_insert(self, c):
        self.kind[c] = 0
        self.tick(c)
        self.join(c)

    def on_return(self, c):
        self.gone[self.kind[c] * AGES + self.age(c)] -= 1.0
        self.join(c)

    def evict(self):
        worst = self.draw()
        least = self.expect(worst)
        for _ in range(self.samples - 1):
            c = self.draw()
            value = self.expect(c)
            if value < least:
                worst = c
                least = value
        self.gone[self.kind[worst] * AGES + self.age(worst)] += 1.0
        self.leave(worst)
        return worst

    def tick(self, c):
        self.touched[c] = self.clock
        self.clock += 1
        if self.clock - self.learned >= max(1024, self.capacity // 4):
            self.learn()

    def age(self, c):
        return min(AGES - 1, int(4.0 * math.log2(1.0 + self.clock - self.touched[c])))

    def expect(self, c):
        if self.learned == 0:
            return -float(self.age(c))  # until something is known: LRU
        return self.density[self.kind[c] * AGES + self.age(c)]

    def learn(self):
        """Hits still to come divided by the time they take, from the oldest age down."""
        self.learned = self.clock
        for kind in range(CLASSES):
            hits = 0.0
            events = 0.0
            lifetime = 0.0
            for step in range(AGES):
                i = kind * AGES + AGES - 1 - step
                hits += self.hit[i]
                events += self.hit[i] + self.gone[i]
                lifetime += events * 2.0 ** ((AGES - 1 - step) / 4.0) * 0.19
                self.density[i] = hits / lifetime if lifetime > 0.0 else 0.0
                self.hit[i] *= self.decay
                self.gone[i] *= self.decay
