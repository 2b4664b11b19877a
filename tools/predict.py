"""``vitdet predict`` as a script. Takes the same arguments."""

import sys

from vitdet.cli import main

sys.exit(main(["predict", *sys.argv[1:]]))
