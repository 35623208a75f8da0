"""Lists in the place of `DaliLoader.unused`, to see whether a buffer is free once it is in there."""


class Overwritten(list):
    """Buffers that are overwritten as soon as they may be used again."""

    def append(self, buffer):
        buffer[:] = 0xA5
        super().append(buffer)


class Dropped(list):
    """Buffers that are never used again."""

    def append(self, buffer):
        pass
