"""Weight files of every layout that is read or written, released names, and adapters."""
