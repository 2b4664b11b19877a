"""``vitdet train`` as a script: what torchrun is pointed at. Takes the same arguments."""

import sys

from vitdet.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
