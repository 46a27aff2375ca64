"""ESM-2, written for one device. Sharding is applied to it from outside (`esmshard.parallel`)."""
