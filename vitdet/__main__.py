"""``python -m vitdet``, which torchrun can start as ``torchrun -m vitdet``."""

import sys

from vitdet.cli import main

sys.exit(main())
