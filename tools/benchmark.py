"""``vitdet benchmark`` as a script. Takes the same arguments."""

import sys

from vitdet.cli import main

sys.exit(main(["benchmark", *sys.argv[1:]]))
