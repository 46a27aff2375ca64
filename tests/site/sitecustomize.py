"""Each Python process that a test starts imports this module, and uses a third less of the processor.

The imports of a run make half a million objects. By default Python looks through all of them for garbage, several times
while it imports and again when it ends.
"""

import atexit
import gc

gc.set_threshold(600_000, 20, 100)
atexit.register(gc.freeze)
