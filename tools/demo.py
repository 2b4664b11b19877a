"""``make demo``: draw digits, train a small detector on them, measure it, show where the pictures are. No network."""

import sys
import time
from pathlib import Path

from vitdet.cli import main

ROOT = Path("runs/demo")
DIGITS, RUN, PICTURES = ROOT / "digits", ROOT / "rtdetr_nano_digits", ROOT / "predictions"
STEPS: dict[str, list[str | Path]] = {
    "make the digits": ["data", "make", "digits", DIGITS],
    "train": ["train", "rtdetr_nano_digits.yaml", f"data.root={DIGITS}", f"output={RUN}", "--overwrite"],
    "evaluate": ["eval", RUN / "best.safetensors", "--data", DIGITS],
    "predict": ["predict", RUN / "best.safetensors", f"{DIGITS}/val/00000*.jpg", "--out", PICTURES, "--sheet"],
}

seconds = {}
for title, arguments in STEPS.items():
    print(f"\n== {title}: vitdet {' '.join(map(str, arguments))}", flush=True)
    start = time.monotonic()
    if code := main([str(argument) for argument in arguments]):
        sys.exit(code)
    seconds[title] = time.monotonic() - start

print(f"\nlook at {PICTURES / 'sheet.jpg'} (the single pictures lie beside it) and {RUN / 'curves.png'}")
print("\n".join(f"{title:<16} {took:6.1f} s" for title, took in seconds.items()))
