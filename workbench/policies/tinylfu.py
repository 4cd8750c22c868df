"""W-TinyLFU (Einziger, Friedman and Manes, 2017), with the choices of libCacheSim's implementation."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["TinyLfu"]

WINDOW, TRIAL, PROTECTED, DOOMED = 1, 2, 3, 4
PROBES = 10
MOST = 65535


@policy
class TinyLfu(Queues):
    """New chunks pass a small LRU window; to stay they must have been counted more often than whom they replace.

    Counts are kept for more chunks than fit, in a counting Bloom filter that is halved now and then. The main part is
    a segmented LRU with segments of 1 to 4. A chunk that falls to a trial segment without room is doomed: it goes next.
    """

    table = dict(Queues.table, counter="u2")
    table_size = 15
    scalars = dict(window_share=0.01, trial_share=0.2, counters_per_chunk=14.4, period=32, main_hits=0)

    def on_hit(self, c):
        q = self.queue[c]
        if q == WINDOW or q == DOOMED:
            self.move(c, WINDOW)
            return
        self.count(c)
        self.main_hits += 1
        if self.main_hits >= self.period * self.main_room():
            self.halve()
        self.move(c, PROTECTED)
        if self.length[PROTECTED] > int(self.main_room() * (1.0 - self.trial_share)):
            if self.length[TRIAL] > 0 and self.length[TRIAL] >= self.trial_room():  # the room may be none
                self.move(self.oldest[TRIAL], DOOMED)
            self.move(self.oldest[PROTECTED], TRIAL)

    def on_insert(self, c):
        self.count(c)
        self.append(WINDOW, c)

    def evict(self):
        if self.length[DOOMED] > 0:
            return self.pop(DOOMED)
        while self.length[WINDOW] > 0:
            new = self.pop(WINDOW)
            loser = new
            if self.length[TRIAL] + self.length[PROTECTED] < self.main_room():
                self.keep(new)
                loser = -1
            else:
                old = self.oldest[TRIAL] if self.length[TRIAL] > 0 else self.oldest[PROTECTED]
                if self.counted(new) > self.counted(old):
                    self.unlink(old)
                    self.keep(new)
                    loser = old
            self.count(new)
            if loser >= 0:
                return loser
        return self.pop(TRIAL) if self.length[TRIAL] > 0 else self.pop(PROTECTED)

    def keep(self, c):
        room_in_trial = self.length[TRIAL] < self.trial_room()
        room_above = self.length[PROTECTED] < int(self.main_room() * (1.0 - self.trial_share))
        self.append(PROTECTED if room_above and not room_in_trial else TRIAL, c)

    def on_return(self, c):
        self.prepend(TRIAL, c)

    def on_remove(self, c):
        self.unlink(c)

    def main_room(self):
        return self.capacity - int(self.capacity * self.window_share)

    def trial_room(self):
        return int(self.main_room() * self.trial_share)

    def first_probe(self, c):
        return (self.key[c] * 25214903917 + 11 >> 16) & 0xFFFFFF

    def step(self, c):
        return (self.key[c] * 44485709377909 + 12345 >> 20) & 0xFFFFFF | 1

    def counters(self):
        return max(2 * PROBES, int(self.counters_per_chunk * self.main_room()))

    def counted(self, c):
        probe = self.first_probe(c)
        step = self.step(c)
        least = MOST
        for _ in range(PROBES):
            least = min(least, self.counter[probe % self.counters()])
            probe += step
        return least

    def count(self, c):
        probe = self.first_probe(c)
        step = self.step(c)
        if self.counted(c) < MOST:
            for _ in range(PROBES):
                i = probe % self.counters()
                if self.counter[i] < MOST:
                    self.counter[i] += 1
                probe += step

    def halve(self):
        self.main_hits = 0
        for i in range(self.counters()):
            self.counter[i] = self.counter[i] >> 1
