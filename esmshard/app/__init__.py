"""A local page in the browser: each of its jobs is a command of esmshard, which the page shows."""
