"""How Penstock's cost grows: with tokens, streams, partitions and API processes; and the unit costs behind it."""
