"""The embedded engine, on llama.cpp.

Importing it sets how long llama.cpp's OpenMP threads spin before they sleep, unless the user did. The default spin of
milliseconds makes two threads on two cores 10 to 100 times slower as soon as any other process wants a core; a short
one costs a few percent on a quiet machine (docs/decisions/0002-threads-and-weights.md). It has to happen before the
library is loaded.
"""

import os

SPIN_COUNT = "1000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
