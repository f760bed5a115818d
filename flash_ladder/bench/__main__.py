"""python -m flash_ladder.bench: bench.py, where the package is installed."""

import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: else its profiler writes to stderr

from .modes import main

sys.exit(main())
