"""A trainer without torch for tests: prints losses like nanoGPT, and ends as it is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LATER = "import time; time.sleep(600)"


def main() -> None:
    mode, rate, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    for step in (0, 10, 20):
        loss = 3 - step / 20 + 100 * rate + seed / 100
        text = "nan" if mode == "nan" and step == 20 else f"{loss:.4f}"
        print(f"iter {step}: loss {loss + 0.5:.4f}, time 3ms")
        print(f"step {step}: train loss 9, val loss {text}", flush=True)
        if mode == "fail" and step == 10:
            print("RuntimeError: no more", file=sys.stderr)
            sys.exit(3)
        if mode == "late" and step == 10:
            later = [sys.executable, "-c", LATER, os.environ["DEEPSTACK_RUN"]]
            subprocess.Popen(later)
            subprocess.Popen(later, start_new_session=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("two children wait", flush=True)
            time.sleep(600)
        if mode.startswith("slow"):
            time.sleep(float(mode.removeprefix("slow")))
    folder = Path(os.environ["DEEPSTACK_RUN"])
    record = {"arguments": sys.argv[1:], "loss": loss, "extra": os.environ.get("EXTRA")}
    (folder / "metrics.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
