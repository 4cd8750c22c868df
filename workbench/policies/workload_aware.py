"""Workload-aware eviction (KVCache cache in the wild, USENIX ATC 2025)."""

import math

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["WorkloadAware"]

CLASSES = 16


@policy
class WorkloadAware(Queues):
    """Evicts the chunk least likely to be used again soon, by how fast chunks of its class come back.

    A class's times to reuse are taken as exponential: after t idle seconds the chance of a use within a class's usual
    lifetime is exp(-rate t) (1 - exp(-rate life)). Only the oldest chunk of each class is looked at. The paper's
    classes are request type and turn; public traces have neither, so here a class is a range of depths (powers of
    two), and rates are learned as the trace runs.
    """

    fields = dict(Queues.fields, used="f8", since="f8")
    table = dict(Queues.table, interval="f8", life="f8")
    scalars = dict(memory=0.999)

    def on_hit(self, c):
        q = self.queue[c]
        self.interval[q] = self.mean(self.interval[q], self.now - self.used[c])
        self.used[c] = self.now
        self.move(c, q)

    def on_insert(self, c):
        self.used[c] = self.now
        self.since[c] = self.now
        self.append(1 + min(CLASSES - 1, int(math.log2(1.0 + self.depth[c]))), c)

    def evict(self):
        worst = -1
        least = 2.0
        for q in range(1, CLASSES + 1):
            if self.length[q] > 0:
                c = self.oldest[q]
                chance = self.chance(c, q)
                if chance < least or (chance == least and self.depth[c] > self.depth[worst]):
                    worst = c
                    least = chance
        q = self.queue[worst]
        self.life[q] = self.mean(self.life[q], self.now - self.since[worst])
        self.unlink(worst)
        return worst

    def on_return(self, c):
        self.prepend(1 + min(CLASSES - 1, int(math.log2(1.0 + self.depth[c]))), c)

    def on_remove(self, c):
        self.unlink(c)

    def chance(self, c, q):
        if self.interval[q] <= 0.0 or self.life[q] <= 0.0:
            return 1.0 / (1.0 + self.now - self.used[c])  # nothing known of the class: LRU
        rate = 1.0 / self.interval[q]
        return math.exp(-rate * (self.now - self.used[c])) * (1.0 - math.exp(-rate * self.life[q]))

    def mean(self, old, new):
        return new if old == 0.0 else self.memory * old + (1.0 - self.memory) * new
