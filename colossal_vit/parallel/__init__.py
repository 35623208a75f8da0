"""Who holds what: layout, shards of parameters, random numbers of ranks, messages between ranks."""
