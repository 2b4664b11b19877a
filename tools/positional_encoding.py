"""Draw what sinusoidal, rotary and ALiBi positions do (``--out PATH --length N --channels C``)."""

import sys

from vitdet.illustrations import main

sys.exit(main())
