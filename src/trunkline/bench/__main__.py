"""`python -m trunkline.bench`."""

import sys

from trunkline.bench.command import main

sys.exit(main())
