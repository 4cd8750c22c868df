"""A pool of chunks to draw from at random: what policies that sample are written on."""

__all__ = ["Pool"]


class Pool:
    """The chunks in the order, in no order. A base for policies, not one itself.

    Random numbers come from a 48-bit linear congruential generator, the same compiled and plain.
    """

    fields = dict(place="i4")
    table = dict(member="i4")
    scalars = dict(seed=1, members=0)

    def join(self, c):
        self.member[self.members] = c
        self.place[c] = self.members
        self.members += 1

    def leave(self, c):
        self.members -= 1
        last = self.member[self.members]
        self.member[self.place[c]] = last
        self.place[last] = self.place[c]

    def draw(self):
        self.seed = (self.seed * 25214903917 + 11) & 0xFFFFFFFFFFFF
        return self.member[(self.seed >> 16) % self.members]

    def on_insert(self, c):
        self.join(c)

    def on_return(self, c):
        self.join(c)

    def on_remove(self, c):
        self.leave(c)
