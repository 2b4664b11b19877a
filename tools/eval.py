"""``vitdet eval`` as a script. Takes the same arguments."""

import sys

from vitdet.cli import main

sys.exit(main(["eval", *sys.argv[1:]]))
