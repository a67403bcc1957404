"""The pictures of the guides: first screens of reports, from runs made for it. Needs Chromium; no GPU, a minute.

python benchmarks/screenshots.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ROOT / "docs" / "images"
RUNS: Final = {
    "analyze": (["analyze", "--example"], "900,520"),
    "plan": (["plan", str(ROOT / "examples" / "phi2_fsdp_a40.toml")], "900,520"),
}
"""By the picture's name: what runs, and the size of the window."""
MOST_BYTES: Final = 150_000
"""Of all pictures together: they are in every clone."""


def main() -> int:
    """Runs, takes the pictures, and returns the exit code."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.stderr.write("no Chromium was found; install one, or leave the pictures as they are\n")
        return 2
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (words, size) in RUNS.items():
            run = Path(folder, name)
            command = [sys.executable, "-m", "lagom_overlap", *words, "--out", str(run)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            taken = [f"--window-size={size}", f"--screenshot={run / 'page.png'}", (run / "report.html").as_uri()]
            options = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ]
            subprocess.run([browser, *options, *taken], check=True, capture_output=True, timeout=180)
            shutil.copyfile(run / "page.png", IMAGES / f"{name}.png")
    num_bytes = sum(path.stat().st_size for path in IMAGES.glob("*.png"))
    print(f"{len(RUNS)} pictures in {IMAGES.relative_to(ROOT)}, {num_bytes} bytes (at most {MOST_BYTES})")
    return int(num_bytes > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
