"""Which experts the next layers will choose."""
