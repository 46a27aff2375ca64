"""The layout of a one-device model over the ranks of a run, and the loading of its shards."""
